"""TPU slices and GPUs by name, with their rates and devices, to compile for without having them."""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.numerics import GPU_FAMILIES
from tim_jax.placement import Devices

# What JAX takes of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
SHARE = 0.75
# XLA's own products, which only gradients have, are left to cuBLAS. XLA would choose among
# kernels of its own by timing them, and there is no device to time them on.
COMPILER_OPTIONS: Mapping[str, bool] = MappingProxyType({"xla_gpu_enable_triton_gemm": False})


@dataclass(frozen=True)
class Rates:
    """Rates of one device, a second, and overheads in seconds."""

    bfloat16: float  # operations of products
    float32: float
    memory: float  # bytes
    links: float  # bytes received from other devices
    launch: float  # of an instruction
    step: float = 0.0  # of a kernel's grid
    cache: float = 0.0  # bytes between cache and cores; 0: programs load from memory
    cores: int = 1  # that run programs of a kernel side by side
    core: float = float("inf")  # bytes that one of them loads

    def products(self, dtype: str) -> float:
        """Operations of products a second, in this compute dtype."""
        return self.float32 if dtype == "float32" else self.bfloat16


@dataclass(frozen=True)
class Generation:
    """A kind of chip that is planned for."""

    text: str
    platform: str
    capacity: int  # bytes of a device's memory that programs may have
    slices: tuple[str, ...]  # by chips, ascending; GPUs of one machine by their number
    rates: Rates
    devices_per_chip: int = 1
    description: str = ""  # of a GPU: XLA's GpuTargetConfigProto, as text


_CONFIG = """
platform_name: "CUDA"
device_description_str: "{text}"
dnn_version_info {{ major: 9 minor: 14 }}
gpu_device_info {{
  name: "{text}"
  model_str: "sm_9.0a {text}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  platform_version: "Compute Capability 9.0a"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.14.0"
  core_count: {cores}
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  pcie_bandwidth: 34359738368
  device_address_bits: 64
  ecc_enabled: true
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}}
"""
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"),
    *("4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
)


def _tpu(
    text: str,
    gib: float,
    slices: tuple[str, ...],
    bfloat16: float,
    memory: float,
    links: float,
    devices_per_chip: int = 1,
) -> Generation:
    """Its memory is what libtpu 0.0.52 names when it refuses a program."""
    # A float32 product is six products of bfloat16 parts.
    rates = Rates(bfloat16, bfloat16 / 6, memory, links, launch=1e-6, step=0.35e-6)
    return Generation(text, "tpu", round(gib * 2**30), slices, rates, devices_per_chip)


def _hopper(text: str, memory: int, bandwidth: int, cache: int) -> Generation:
    """A GPU of compute capability 9.0, by bytes of NVIDIA's data sheet."""
    cores = 132
    core = 110e9  # 64 bytes a clock
    rates = Rates(
        989e12, 67e12, bandwidth, 450e9, launch=2e-6, cache=5.5e12, cores=cores, core=core
    )
    description = _CONFIG.format(
        text=text, memory=memory, bandwidth=bandwidth, cache=cache, cores=cores
    )
    capacity, machines = round(SHARE * memory), ("1", "2", "4", "8")
    return Generation(text, "cuda", capacity, machines, rates, description=description)


# Rates of products, memory and links by the makers' data sheets (links in one direction). Launches,
# steps of a grid and the cache are assumptions.
GENERATIONS: Mapping[str, Generation] = MappingProxyType(
    {
        "v5e": _tpu("TPU v5e", 15.75, _FLAT, 197e12, 819e9, 200e9),
        "v5p": _tpu("TPU v5p", 95.73, _DEEP, 459e12, 2765e9, 600e9),
        "v6e": _tpu("TPU v6e", 31.24, _FLAT, 918e12, 1640e9, 400e9),
        # Rates are those of one of a chip's two devices.
        "tpu7x": _tpu("TPU7x", 94.74, _DEEP, 1153e12, 3690e9, 300e9, 2),
        "h100": _hopper("NVIDIA H100", 85_520_809_984, 3_350_000_000_000, 50 * 2**20),
        "h200": _hopper("NVIDIA H200", 150_754_820_096, 4_800_000_000_000, 60 * 2**20),
    }
)
_NAME = re.compile(r"([\w.-]+):([0-9]{1,6}(?:x[0-9]{1,6}){0,3})")


@dataclass(frozen=True)
class Target:
    """The target of compilation: a platform, devices that need not be here, a device's memory."""

    name: str
    platform: str
    devices: Devices
    capacity: int  # bytes a device
    chips: int

    @property
    def kind(self) -> str:
        """The name of its generation."""
        return self.name.partition(":")[0]

    @property
    def rates(self) -> Rates | None:
        """Of one of its devices, if they are known."""
        return GENERATIONS[self.kind].rates if self.kind in GENERATIONS else None

    @property
    def options(self) -> dict[str, Any]:
        """Of its compiler."""
        return dict(COMPILER_OPTIONS) if self.platform == "cuda" else {}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which programs are traced for this target's devices."""
        one = self.devices[0]
        if one.platform == jax.default_backend():
            yield
            return
        cores = getattr(one, "num_cores", self.rates.cores if self.rates else 1)
        device = AbstractDevice(one.device_kind, cores, self.platform)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            yield


def check(name: str) -> tuple[Generation, int]:
    """The generation of a slice's name, such as "v5e:4x4", and how many devices it has.

    Raises:
      InputError: there is no such generation or slice.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise InputError(
            f"--topology {name!r}: write GENERATION:SIZES, such as v5e:4x4, v5p:2x2x4 or h200:1"
        )
    kind, sizes = match[1], match[2]
    if kind not in GENERATIONS:
        raise InputError(
            f"--topology {name!r}: unknown generation {kind!r}{did_you_mean(kind, GENERATIONS)}"
        )
    generation = GENERATIONS[kind]
    if sizes not in generation.slices:
        slices, larger = ", ".join(generation.slices), smallest(kind, count_chips(sizes))
        raise InputError(
            f"--topology {name!r}: {generation.text} has no slice {sizes}; it has {slices}"
            f"{f'; nearest: {larger}' if larger else ''}"
        )
    return generation, count_chips(sizes) * generation.devices_per_chip


def count_chips(sizes: str) -> int:
    """How many chips a slice of these sizes has: 16 of `4x4`."""
    return prod(int(n) for n in sizes.split("x"))


def smallest(kind: str, wanted: int) -> str | None:
    """The smallest slice of a generation with at least `wanted` chips, by its whole name."""
    slices = GENERATIONS[kind].slices
    return next((f"{kind}:{sizes}" for sizes in slices if count_chips(sizes) >= wanted), None)


def check_devices(name: str, wanted: int) -> None:
    """Raises InputError unless the slice `name` has as many devices as a placement wants."""
    generation, have = check(name)
    if wanted > have:
        larger = smallest(name.partition(":")[0], -(-wanted // generation.devices_per_chip))
        hint = f"; {larger} has enough" if larger else ""
        raise InputError(
            f"--topology {name!r}: the placement needs {wanted} devices, it has {have}{hint}"
        )


def check_family(there: Generation, family: str) -> None:
    """Refuses a kernel family that has no kernels for these devices."""
    here = GPU_FAMILIES if there.platform == "cuda" else ("pallas_tpu",)
    if family.startswith("pallas") and family not in here:
        raise InputError(
            f'plan: numerics.family = "{family}" has no kernels for {there.text};'
            f' there it can be "{here[0]}"'
        )


def target(name: str) -> Target:
    """The devices of a slice or machine, from libtpu or from JAX's plugin for CUDA.

    Raises:
      InputError: as `check`; what it takes is not installed, or does not go with this JAX.
    """
    generation, count = check(name)
    platform, description = generation.platform, generation.description
    if platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "plan: compiling for a TPU needs libtpu, which is not installed; install tim-jax[plan]"
        )
    if platform == "cuda":  # partitions, hosts of each, devices of each
        what: dict[str, Any] = {
            "topology_name": "",
            "topology": f"1x1x{count}",
            "target_config": description,
        }
        lacking = (
            "compiling for a GPU needs JAX's plugin for CUDA, which does not work here with {};"
            " install tim-jax[cuda]"
        )
    else:
        # Hosts have 2x2 chips unless told otherwise, and libtpu 0.0.41 refuses a smaller slice.
        single = count == generation.devices_per_chip
        what = {"topology_name": name} | ({"chips_per_host_bounds": [1, 1, 1]} if single else {})
        lacking = f"libtpu has no devices of {name} with {{}}"
    try:
        topology: Any = topologies.get_topology_desc(platform=platform, **what)
    except Exception as error:  # whatever the plugin and its loader raise
        reason = f"jax {jax.__version__} ({' '.join(str(error).split())[:200]})"
        raise InputError(f"plan: {lacking.format(reason)}") from None
    devices = tuple(topology.devices)
    chips = len(devices) // generation.devices_per_chip
    return Target(name, platform, devices, generation.capacity, chips)
