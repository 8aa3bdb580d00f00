"""Compiles every kernel, a sampler and a learner for a TPU that is not here.

python tests/tpu_compile.py v5e:1x1            # needs libtpu, on a CPU machine
python tests/tpu_compile.py v5e:1x1 --kernels  # without the sampler and the learner
"""

import os
import sys

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # else libtpu's lock file keeps other processes out
    TPU_ACCELERATOR_TYPE="v5litepod-1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
    TPU_STDERR_LOG_LEVEL="3",
    TPU_MIN_LOG_LEVEL="3",
    TF_CPP_MIN_LOG_LEVEL="3",
    TPU_LOG_DIR="disabled",
)

import lowering
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tim_jax.instruments.plan import topology


def main() -> int:
    """Prints a line a program; 1 if one could not be compiled."""
    mesh = Mesh(np.array(topology.target(sys.argv[1]).devices[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    failed = 0
    for dtype, numerics in lowering.NUMERICS["pallas_tpu"].items():
        programs = dict(lowering.operations(numerics))
        if dtype == "bfloat16":
            if "--kernels" not in sys.argv:
                programs |= lowering.programs(numerics, config=lowering.one_layer())
            programs |= lowering.products_in_float32(numerics)
        for name, (function, shapes) in programs.items():
            try:
                lowering.lower("pallas_tpu", function, shapes, sharding=sharding).compile()
                print(f"{dtype} {name}: compiled", flush=True)
            except Exception as error:
                failed = 1
                print(f"{dtype} {name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
