"""TPU slices and GPUs by name, and their devices, to compile for without having them."""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.placement import Devices

# What JAX takes of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
SHARE = 0.75
# XLA's own products, which only gradients have, are left to cuBLAS. XLA would choose among
# kernels of its own by timing them, and there is no device to time them on.
COMPILER_OPTIONS: Mapping[str, bool] = MappingProxyType({"xla_gpu_enable_triton_gemm": False})


@dataclass(frozen=True)
class Gpu:
    """A GPU of compute capability 9.0, by NVIDIA's data sheet."""

    text: str
    memory: int  # bytes
    bandwidth: int  # bytes a second, of its memory
    cache: int  # bytes, level 2
    cores: int = 132  # streaming multiprocessors

    @property
    def capacity(self) -> int:
        """Bytes that JAX lets programs have."""
        return round(SHARE * self.memory)

    @property
    def description(self) -> str:
        """XLA's GpuTargetConfigProto, as text."""
        return _CONFIG.format(gpu=self)


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "h100": Gpu("NVIDIA H100", 85_520_809_984, 3_350_000_000_000, 50 * 2**20),
        "h200": Gpu("NVIDIA H200", 150_754_820_096, 4_800_000_000_000, 60 * 2**20),
    }
)

_CONFIG = """
platform_name: "CUDA"
device_description_str: "{gpu.text}"
dnn_version_info {{ major: 9 minor: 14 }}
gpu_device_info {{
  name: "{gpu.text}"
  model_str: "sm_9.0a {gpu.text}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  platform_version: "Compute Capability 9.0a"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.14.0"
  core_count: {gpu.cores}
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: {gpu.memory}
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.cache}
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


_GIB = 2**30


@dataclass(frozen=True)
class Generation:
    """A kind of chip that is planned for."""

    text: str
    capacity: int  # bytes of a device's memory that its compiler lets a program have
    slices: tuple[str, ...]  # by chips, ascending; GPUs of one machine by their number
    devices_per_chip: int = 1
    platform: str = "tpu"


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"),
    *("4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
)
# Capacities are those that libtpu 0.0.52 names when it refuses a program.
GENERATIONS: Mapping[str, Generation] = MappingProxyType(
    {
        "v5e": Generation("TPU v5e", round(15.75 * _GIB), _FLAT),
        "v5p": Generation("TPU v5p", round(95.73 * _GIB), _DEEP),
        "v6e": Generation("TPU v6e", round(31.24 * _GIB), _FLAT),
        "tpu7x": Generation("TPU7x", round(94.74 * _GIB), _DEEP, devices_per_chip=2),
    }
    | {
        name: Generation(gpu.text, gpu.capacity, ("1", "2", "4", "8"), platform="cuda")
        for name, gpu in GPUS.items()
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
    cores: int = 1  # of a device
    options: Mapping[str, Any] = field(default_factory=dict)  # of its compiler

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which programs are traced for this target's devices."""
        one = self.devices[0]
        if one.platform == jax.default_backend():
            yield
            return
        cores = getattr(one, "num_cores", self.cores)
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
    for sizes in GENERATIONS[kind].slices:
        if count_chips(sizes) >= wanted:
            return f"{kind}:{sizes}"
    return None


def check_devices(name: str, wanted: int) -> None:
    """Raises InputError unless the slice `name` has as many devices as a placement wants."""
    generation, have = check(name)
    if wanted > have:
        larger = smallest(name.partition(":")[0], -(-wanted // generation.devices_per_chip))
        hint = f"; {larger} has enough" if larger else ""
        raise InputError(
            f"--topology {name!r}: the placement needs {wanted} devices, it has {have}{hint}"
        )


def target(name: str) -> Target:
    """The devices of a slice or machine, from libtpu or from JAX's plugin for CUDA.

    Raises:
      InputError: as `check`; what it takes is not installed, or does not go with this JAX.
    """
    generation, _ = check(name)
    return _gpus(name) if generation.platform == "cuda" else _slice(name, generation)


def _slice(name: str, generation: Generation) -> Target:
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "plan: compiling for a TPU needs libtpu, which is not installed; install tim-jax[plan]"
        )
    # Hosts have 2x2 chips unless told otherwise, and libtpu 0.0.41 refuses a smaller slice.
    host = {"chips_per_host_bounds": [1, 1, 1]} if count_chips(name.partition(":")[2]) == 1 else {}
    try:
        topology: Any = topologies.get_topology_desc(platform="tpu", topology_name=name, **host)
    except Exception as error:  # whatever libtpu and its loader raise
        raise InputError(f"plan: libtpu has no devices of {name} with {_reason(error)}") from None
    devices = tuple(topology.devices)
    chips = len(devices) // generation.devices_per_chip
    return Target(name, "tpu", devices, generation.capacity, chips)


def _reason(error: Exception) -> str:
    return f"jax {jax.__version__} ({' '.join(str(error).split())[:200]})"


def _gpus(name: str) -> Target:
    kind, _, count = name.partition(":")
    gpu = GPUS[kind]
    try:
        topology: Any = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology=f"1x1x{count}",  # partitions, hosts of each, devices of each
            target_config=gpu.description,
        )
    except Exception as error:  # whatever the plugin and its loader raise
        raise InputError(
            f"plan: compiling for a GPU needs JAX's plugin for CUDA, which does not work here with"
            f" {_reason(error)}; install tim-jax[cuda]"
        ) from None
    devices = tuple(topology.devices)
    return Target(name, "cuda", devices, gpu.capacity, len(devices), gpu.cores, COMPILER_OPTIONS)
