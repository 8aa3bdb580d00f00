"""verl's `rollout_correction` as entries of `learner.corrections`."""

from typing import Any

from tim_jax.app.config.verl_keys import Keys

REJECTIONS = tuple(
    f"{over}_{statistic}"
    for over, statistics in (
        ("token", ("k1", "k2", "k3")),
        ("seq_sum", ("k1", "k2", "k3")),
        ("seq_mean", ("k1", "k2", "k3")),
        ("seq_max", ("k2", "k3")),
    )
    for statistic in statistics
)


def rejections(keys: Keys, path: str) -> list[tuple[str, str]]:
    """(option, bounds) of each rejection, each option once."""
    given = keys.get(f"{path}.rollout_rs", None)
    threshold = keys.get(f"{path}.rollout_rs_threshold", None)
    if given is None:
        return []
    options = [part.strip() for part in str(given).split(",") if part.strip()]
    for option in options:
        if option not in REJECTIONS:
            raise keys.wrong(
                f"{path}.rollout_rs", option, f"must be one of {', '.join(REJECTIONS)}"
            )
    options = list(dict.fromkeys(options))
    bounds = [part.strip() for part in str(threshold).split(",")]
    if threshold is None or len(bounds) not in (1, len(options)):
        rule = f"must be one bound for all, or {len(options)}"
        raise keys.wrong(f"{path}.rollout_rs_threshold", threshold, rule)
    return list(zip(options, bounds * (len(options) // len(bounds)), strict=True))


def rejection(keys: Keys, path: str, option: str, text: str) -> dict[str, Any]:
    """The entry of an option of `rollout_rs` and its bounds, "upper" or "lower_upper"."""
    path = f"{path}.rollout_rs_threshold"
    over, statistic = option.rsplit("_", 1)
    entry = {"name": "reject", "statistic": statistic, "over": over.removeprefix("seq_")}
    lower, upper = _bounds(keys, path, text)
    if upper <= 0 or (lower is not None and lower <= 0):
        raise keys.wrong(path, text, "must be above 0")
    if statistic != "k1":
        if lower is not None:
            raise keys.wrong(path, text, f"{option} has an upper bound alone")
        return entry | {"upper": upper}
    # verl's bounds are on 1 / r.
    return entry | {"lower": 1.0 / upper, "upper": upper if lower is None else 1.0 / lower}


def weights(keys: Keys, path: str) -> list[dict[str, Any]]:
    """The entries of `rollout_is`; none if it is null."""
    threshold = keys.get(f"{path}.rollout_is_threshold", None)
    divided = keys.get(f"{path}.rollout_is_batch_normalize", False)
    if keys.get(f"{path}.rollout_is", None) is None:
        return []
    level = keys.choice(f"{path}.rollout_is", "token", ("token", "sequence"))
    given = "2.0" if threshold is None else threshold
    lower, upper = _bounds(keys, f"{path}.rollout_is_threshold", given)
    entries: list[dict[str, Any]] = [{"name": f"{level}_tis", "cap": upper}]
    if lower is not None:  # IcePop
        entries = [{"name": "scale_by_ratio", "level": level}]
        entries += [{"name": "mask_outside", "level": level, "lower": lower, "upper": upper}]
    return [*entries, {"name": "normalise", "unit": level}] if divided else entries


def _bounds(keys: Keys, path: str, text: Any) -> tuple[float | None, float]:
    """Of "upper" or "lower_upper"."""
    lower, given, upper = str(text).rpartition("_")
    return keys.number(path, lower) if given else None, keys.number(path, upper)
