"""NVIDIA GPUs as XLA describes them to its compiler, to compile for without having one."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

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
