"""The command line: thin commands over the jobs. The only place that reads the environment."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tim_jax.errors import InputError, MismatchError

_FAMILIES = ("tiles", "native", "pallas_gpu", "pallas_tpu")  # numerics.FAMILIES, without its JAX
_BAD_INPUT, _MISMATCH, _INTERRUPTED = 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit status: 0, 1 (audit failed), 2 (bad input), 3 (not exact)."""
    arguments = _parser().parse_args(argv)
    _quiet()
    try:
        return arguments.run(arguments)
    except InputError as error:
        print(f"tim-jax: {error}", file=sys.stderr)
        return _BAD_INPUT
    except MismatchError as error:
        print(f"tim-jax: not exact: {error}", file=sys.stderr)
        return _MISMATCH
    except KeyboardInterrupt:
        print("tim-jax: interrupted; the same command goes on from the last checkpoint")
        return _INTERRUPTED


def _quiet() -> None:
    """Silences what libraries say about themselves on stderr."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tim-jax",
        description="RL for language models with sampler and learner log-probs equal to the bit.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    overrides = "changes to the config, such as steps=200 or optimizer.learning_rate=1e-6"

    train = commands.add_parser("train", help="train (or resume) the run of a config")
    train.add_argument("config", help="TOML file, see configs/")
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=overrides)
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("eval", help="evaluate on the held-out problems of a config")
    evaluate.add_argument("config", help="TOML file, see configs/")
    evaluate.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=overrides)
    evaluate.add_argument("--model", help="folder or hub name; default: the run's checkpoint")
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write the scores there")
    evaluate.set_defaults(run=_evaluate)

    generate = commands.add_parser("generate", help="sample completions")
    generate.add_argument("model", help="folder, hub name or run folder")
    generate.add_argument("prompt", nargs="+")
    generate.add_argument("--samples", type=int, default=1)
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    generate.add_argument("--top-k", type=int, default=0, help="0 is off")
    generate.add_argument("--top-p", type=float, default=1.0, help="1 is off")
    generate.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--plain", action="store_true", help="no chat template")
    for axis in ("data", "fsdp", "tensor"):
        generate.add_argument(f"--{axis}", type=int, default=1, help=f"devices on the {axis} axis")
    generate.set_defaults(run=_generate)

    audit = commands.add_parser("audit", help="prove that sampler and learner agree to the bit")
    audit.add_argument("model", help="folder, hub name, run folder, or a preset")
    audit.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    audit.add_argument("--quick", action="store_true", help="fewer cases")
    audit.add_argument("--family", choices=_FAMILIES, default="tiles", help="kernels (tiles)")
    audit.add_argument(
        "--interpret", action="store_true", help="run Pallas kernels without their device, slowly"
    )
    audit.add_argument(
        "--sampler",
        metavar="ENTRIES",
        help="measure the mismatch of a sampler instead: TOML file or inline list, such as"
        """ '[{name = "kv_cache", dtype = "float8_e4m3fn"}]'; see docs/mismatch.md""",
    )
    audit.add_argument("--markdown", type=Path, metavar="FILE", help="with --sampler: tables")
    audit.add_argument("--chart", type=Path, metavar="FILE", help="with --sampler: PNG, PDF or SVG")
    audit.add_argument("--dtype", choices=("float32", "bfloat16"), help="with --sampler: learner's")
    audit.add_argument("--prompts", type=int, default=32, help="with --sampler")
    audit.add_argument("--samples", type=int, default=8, help="with --sampler: per prompt")
    audit.set_defaults(run=_audit)
    return parser


# The jobs are imported by the command that needs them, so that --help and bad arguments do not
# wait for JAX.


def _train(arguments: argparse.Namespace) -> int:
    from tim_jax import config_io, jobs

    folder = jobs.train_run(config_io.load(arguments.config, arguments.overrides))
    print(f"metrics, samples, chart and model: {folder}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from tim_jax import config_io, jobs

    config = config_io.load(arguments.config, arguments.overrides)
    metrics = jobs.evaluate_run(config, model=arguments.model)
    for name, value in metrics.items():
        print(f"{name:>12}  {value:.4f}")
    _write(arguments.json, json.dumps(metrics, indent=2))
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from tim_jax import jobs
    from tim_jax.placement import Placement
    from tim_jax.policy import Sampling

    if arguments.samples < 1:
        raise InputError(f"--samples must be at least 1, got {arguments.samples}")
    sampling = Sampling(
        max_response_length=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
    )
    rows = jobs.generate(
        arguments.model,
        arguments.prompt,
        samples=arguments.samples,
        sampling=sampling,
        dtype=arguments.dtype,
        seed=arguments.seed,
        chat_template=False if arguments.plain else "auto",
        where=Placement(arguments.data, arguments.fsdp, arguments.tensor),
    )
    for prompt, completion, log_prob in rows:
        print(f"{prompt}\n  -> {completion}   (log-prob {log_prob:.3f})")
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from tim_jax import audit_job

    if arguments.sampler is not None:
        return _ablate(arguments)
    for name in ("markdown", "chart", "dtype"):
        if getattr(arguments, name) is not None:
            raise InputError(f"--{name} goes with --sampler")
    report, passed = audit_job.audit_model(
        arguments.model,
        quick=arguments.quick,
        family=arguments.family,
        interpret=arguments.interpret,
    )
    _write(arguments.json, report)
    return 0 if passed else 1


def _ablate(arguments: argparse.Namespace) -> int:
    from tim_jax import ablation_job

    dial = ablation_job.read_dial(arguments.sampler)
    bench = ablation_job.make_bench(
        arguments.model,
        prompts=arguments.prompts,
        samples=arguments.samples,
        dtype=arguments.dtype,
    )
    result = ablation_job.measure(bench, dial, chart=arguments.chart)
    _write(arguments.json, result.json)
    _write(arguments.markdown, result.markdown)
    return 0 if result.exact else 1


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
