"""Episodes of several turns: scored to the bit, nothing computed twice, whoever waits for whom."""

import json
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from conversing import Replying
from several import finished, started

from tim_jax import mismatch
from tim_jax.common.errors import InputError
from tim_jax.model.execution import Batching, Execution, Sampling
from tim_jax.numerics.strict import unequal_bits
from tim_jax.placement import Placement
from tim_jax.policy import sampler, scoring
from tim_jax.rl import episodes
from tim_jax.rl.programs import weights_program
from tim_jax.rl.rules import Turns
from tim_jax.rl.types import cut_rollout
from tim_jax.tasks.base import Outcome
from tim_jax.tasks.environments import SharedAsker

ROOM = 150
SAMPLING = Sampling(ROOM, stop_tokens=(3, 5))
CONFIG = replace(tiny.CONFIG, max_positions=160, sliding_window=21, window_layers=(True, False))
EXACT = Execution(CONFIG, tiny.NUMERICS, SAMPLING)
TURNS = Turns(8, 16)
ROWS, SLOTS, PAGES = Batching(), Batching(slots=5), Batching(slots=4, halvings=1, pages=22)
SLOTS_OF_TWO = Batching(slots=6)


@cache
def programs(batching=ROWS, execution=EXACT, turns=TURNS, dial=mismatch.EXACT):
    return episodes.build(
        execution, turns=turns, samples=tiny.GROUP, batching=batching, mismatch=dial
    )


@cache
def weights(execution=EXACT):
    return weights_program(execution)(tiny.params(execution.config))


@cache
def scorer(execution=EXACT):
    @jax.jit
    def unequal(weights, rollout):
        scored = scoring.score(weights, rollout, execution=execution).log_probs
        return jnp.sum(rollout.mask & unequal_bits(scored, rollout.log_probs))

    return unequal


def play(environment=None, batching=ROWS, execution=EXACT, *, seed=7, **others):
    played = episodes.play(
        weights(execution),
        tiny.prompts(),
        jax.random.key(seed),
        programs=programs(batching, execution, **others),
        environment=environment or Replying(),
        states=[[] for _ in range(tiny.PROMPTS)],
        text=lambda tokens: " ".join(map(str, tokens)),
    )
    return played._replace(rollout=jax.device_get(played.rollout))


def unequal(rollout, execution=EXACT):
    """Tokens whose scores are others than recorded; of as many rows at a time as there are samples,
    so that one program scores episodes of any number of rows."""
    rollout, found = replace(rollout, parts=1, drawn_log_probs=None), 0
    for start in range(0, len(rollout.lengths), tiny.ROWS):
        some = jax.tree.map(lambda x, at=start: x[at : at + tiny.ROWS], rollout)
        found += int(scorer(execution)(weights(execution), some))
    return found


def same(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@cache
def reference():
    return play()


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("batching", [ROWS, slow(PAGES), slow(SLOTS)])
def test_one_pass_over_an_episode_has_the_bits_of_its_turns(batching):
    """Windows; replies longer than a page of 16; fewer slots than rows; pages taken back."""
    played = play(batching=batching)
    rollout = played.rollout
    assert unequal(rollout) == 0
    assert int(rollout.mask.sum()) > 400
    assert same(rollout, reference().rollout)
    assert played.metrics["turns"] > 3
    assert 0 < played.metrics["reply_tokens"] == int(rollout.lengths.sum() - rollout.mask.sum())


WIDE = replace(tiny.NUMERICS, kv_block=32, compute_dtype="bfloat16")
EXPERTS = replace(
    CONFIG,
    model_type="qwen3_moe",
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    norm_topk_prob=True,
    sliding_window=0,
    window_layers=(),
)
OTHERS = {
    "experts": replace(EXACT, config=EXPERTS),
    "bfloat16": replace(EXACT, numerics=WIDE),
    "truncated": replace(EXACT, sampling=replace(SAMPLING, top_k=9, top_p=0.8, temperature=0.7)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batching"), [("experts", PAGES), ("bfloat16", ROWS), ("truncated", PAGES)]
)
def test_other_numerics_and_distributions_keep_the_bits_too(name, batching):
    played = play(batching=batching, execution=OTHERS[name])
    assert unequal(played.rollout, OTHERS[name]) == 0


def test_scoring_sees_a_reply_that_was_another():
    """The comparison is of the whole context: one token of a reply changes what follows."""
    rollout = reference().rollout
    replies = ~np.asarray(rollout.drawn) & (np.arange(ROOM) < np.asarray(rollout.lengths)[:, None])
    last = replies[:, :-1] & np.asarray(rollout.drawn)[:, 1:]  # of a reply, within the window
    row, column = np.argwhere(last)[0]
    responses = rollout.responses.copy()
    responses[row, column] = (responses[row, column] + 1) % CONFIG.vocab_size
    assert unequal(replace(rollout, responses=responses)) > 0


@pytest.mark.parametrize("batching", [ROWS, slow(SLOTS)])
def test_keys_and_values_of_every_position_are_computed_once(batching, monkeypatch):
    """Those of prompts by `begin`; each other one by one chunk or by one step, none by both."""
    compiled = programs(batching)
    taken = []

    def extend(weights, cache, chunks):
        for number in range(int(chunks.count)):  # of one device
            for tables, where in zip(chunks.pages[number], chunks.positions[number], strict=True):
                taken.extend((*tables.tolist(), at) for at in where.tolist() if at < last)
        return compiled.extend(weights, cache, chunks)

    last = tiny.prompts().tokens.shape[1] + ROOM - 1
    drawn = []

    def decode(weights, cache, names, work, until):
        cache, found = compiled.decode(weights, cache, names, work, until)
        steps = np.asarray(found.lengths - work.lengths)[work.working]
        drawn.append(int(steps.sum()))
        return cache, found

    counting = compiled._replace(extend=extend, decode=decode)
    monkeypatch.setattr(f"{__name__}.programs", lambda *_: counting)
    played = play(batching=batching)
    assert len(set(taken)) == len(taken) == played.extended > 500
    # All but each episode's last token, whose keys and values nobody reads.
    lengths = np.asarray(played.rollout.lengths)
    assert len(taken) + sum(drawn) == (lengths - 1).sum()


def test_what_pages_lack_is_computed_again_and_changes_no_bit():
    tight = play(batching=PAGES)
    assert tight.extended > reference().extended
    assert tight.metrics == reference().metrics
    with pytest.raises(InputError, match="pages = 3 on each device do not hold"):
        play(batching=Batching(slots=4, pages=3))


def test_neither_turns_nor_lengths_compile_anything():
    compiled = programs(ROWS, EXACT)
    play()
    parts = ("begin", "extend", "decode")
    before = [getattr(compiled, name)._cache_size() for name in parts]
    assert before == [1, 1, 1]
    for environment in (Replying(3), Replying(100, ending=0.5), Replying(ending=1.0)):
        play(environment, seed=environment.replies.longest)
    assert [getattr(compiled, name)._cache_size() for name in parts] == before


@pytest.mark.parametrize("batching", [ROWS, PAGES])
def test_late_replies_in_any_order_change_no_bit(batching):
    assert same(play(Replying(shuffled=True), batching).rollout, reference().rollout)


def test_an_episode_of_one_turn_is_the_single_turn_sampler_s():
    draw = jax.jit(sampler.sample, static_argnames=("execution", "samples"))
    short = replace(EXACT, sampling=replace(SAMPLING, max_tokens=TURNS.max_tokens))
    alone = draw(weights(), tiny.prompts(), jax.random.key(7), execution=short, samples=tiny.GROUP)
    played = play(Replying(ending=1.0), turns=Turns(1, TURNS.max_tokens)).rollout
    assert played.drawn is not None
    assert played.drawn.sum() == played.lengths.sum()
    assert same(cut_rollout(replace(played, drawn=None), TURNS.max_tokens), alone)


# --- on meshes -------------------------------------------------------------------------------

HEADS = replace(CONFIG, hidden_size=32, num_heads=4, num_kv_heads=2, intermediate_size=32)
WIDER = replace(EXACT, config=HEADS, numerics=replace(tiny.NUMERICS, column_tiles=2))
MESHES = [
    (EXACT, Placement(data=3, fsdp=2), Batching(slots=6, pages=60)),
    slow(WIDER, Placement(fsdp=2, tensor=2), Batching(slots=4, halvings=1, pages=22)),
    slow(WIDER, Placement(fsdp=2, tensor=2, decode="sharded"), ROWS),
]


@pytest.mark.parametrize(
    ("what", "where", "batching"), MESHES, ids=lambda x: "" if isinstance(x, Execution) else str(x)
)
def test_episodes_of_a_mesh_are_those_of_one_device(what, where, batching):
    """Prompts and samples are split; each device has turns, replies, slots and pages of its own."""
    here = play(Replying(shuffled=True), batching, replace(what, placement=where))
    alone = reference() if what == EXACT else play(execution=what)
    assert same(here.rollout, alone.rollout)
    assert unequal(here.rollout, what) == 0
    for name in ("rewards", "turn_rewards", "failed"):
        np.testing.assert_array_equal(getattr(here, name), getattr(alone, name))
    # How many pages are taken back depends on when replies come.
    more = here.extended - alone.extended
    assert more >= 0 if batching.pages else more == 0
    assert here.metrics == alone.metrics


@pytest.mark.slow
def test_experts_and_episodes_of_theirs_lie_on_the_same_devices():
    what = OTHERS["experts"]
    here = play(batching=SLOTS_OF_TWO, execution=replace(what, placement=Placement(expert=2)))
    assert same(here.rollout, play(execution=what).rollout)


@pytest.mark.slow
def test_a_sampler_that_differs_on_purpose_differs_on_a_mesh_in_the_same_way():
    entries = [{"name": "kv_cache", "dtype": "float8_e4m3fn"}, {"name": "logit_noise", "std": 0.05}]
    dial = mismatch.build([*entries, {"name": "raw_log_probs"}, {"name": "pad_mask", "pad": 4}])
    what = replace(WIDER, sampling=replace(SAMPLING, temperature=0.8))
    alone = play(execution=what, dial=dial)
    where = replace(what, placement=Placement(fsdp=2))
    here = play(batching=SLOTS_OF_TWO, execution=where, dial=dial)
    assert same(here.rollout, alone.rollout)
    assert unequal(here.rollout, what) > 100


SEVERAL = """
import sys
from tim_jax import placement
from tim_jax.placement import Placement
index, address, *paths = sys.argv[1:]
placement.join(address, 2, int(index))
sys.path += paths
import test_episodes as tests
environment = tests.Replying(shuffled=True) if placement.leads() else "never asked"
where = tests.replace(tests.EXACT, placement=Placement(fsdp=2))
print(tests.digest(tests.play(environment, tests.Batching(slots=4, pages=22), where)))
"""


def digest(played):
    return sha256(b"".join(tiny.bits((played.rollout, played.rewards)))).hexdigest()


@pytest.mark.slow
def test_an_environment_of_one_process_is_heard_by_all(tmp_path):
    paths = [str(Path(__file__).parent), str(Path(tiny.__file__).parent)]
    running = started(
        lambda index, address: ["-c", SEVERAL, str(index), address, *paths],
        count=2,
        devices=1,
        folder=tmp_path,
    )
    for status, out, err in finished(running, 600):
        assert status == 0, err
        assert out.split()[-1] == digest(reference())  # after what its transport says


def test_all_of_an_outcome_but_its_state_is_told():
    anew, reward = np.arange(4, dtype=np.int32), np.float32(0.1)
    outcomes = [
        Outcome("kept", np.asarray([7, 8], np.int32), reward, anew=anew),
        Outcome("kept", np.zeros(0, np.int32), done=True, failure="crash: it was killed"),
    ]
    told = []

    def tell(replies):
        told.append(json.loads(json.dumps(replies())))
        return told[-1]

    turns: Any = [(row, None) for row in (5, 3)]
    asking: Any = SimpleNamespace(outcomes=lambda _: enumerate(outcomes))
    unused: Any = None
    first, other = SharedAsker(asking, True, tell), SharedAsker(unused, False, lambda _: told[-1])
    first.ask(turns)
    other.ask(turns)
    assert list(first.replies(waited_for=False)) == list(other.replies(waited_for=False)) == []
    heard: tuple[list, list] = ([], [])
    with first:
        while len(heard[0]) < len(outcomes):
            heard[0].extend(first.replies(least=True))
            heard[1].extend(other.replies(least=True))
    assert list(first.replies(least=True)) == list(other.replies(least=True)) == []  # none is left
    assert [row for row, _ in heard[0]] == [row for row, _ in heard[1]] == [5, 3]
    for (_, here), (_, there) in zip(*heard, strict=True):
        assert (here.state, there.state) == ("kept", None)
        for name in ("tokens", "reward", "done", "failure", "anew"):
            np.testing.assert_array_equal(getattr(here, name), getattr(there, name))


def test_rows_and_slots_that_devices_cannot_share_are_refused():
    five = replace(EXACT, placement=Placement(data=5))
    with pytest.raises(
        InputError, match=r"must divide the 12 sequences .*\(3 prompts x 4 samples\)"
    ):
        play(execution=five)
    with pytest.raises(InputError, match="slots = 5 must be a multiple of data x fsdp = 2"):
        play(batching=SLOTS, execution=replace(EXACT, placement=Placement(data=2)))


# --- how episodes end ------------------------------------------------------------------------


class Scripted:
    """The outcome of a turn by its sample and number."""

    def __init__(self, outcome):
        self.outcome = outcome

    def outcomes(self, turns):
        for index, turn in enumerate(turns):
            yield index, self.outcome(turn)


def outcome(turn, tokens=(7, 8, 9), **fields):
    return Outcome([*turn.state, turn.turn], np.asarray(tokens, np.int32), **fields)


def test_rewards_are_sums_over_turns_and_stand_at_their_last_tokens():
    played = play(Scripted(lambda turn: outcome(turn, reward=turn.turn + 1.0, done=turn.turn == 2)))
    np.testing.assert_array_equal(played.rewards, np.full(tiny.ROWS, 6.0, np.float32))
    for row in range(tiny.ROWS):
        (at,) = np.flatnonzero(played.turn_rewards[row] == 1.0)
        drawn = np.asarray(played.rollout.drawn)[row]
        assert drawn[: at + 1].all()
        assert not drawn[at + 1 : at + 4].any()
        assert np.asarray(played.rollout.responses[row, at + 1 : at + 4]).tolist() == [7, 8, 9]
        last = int(played.rollout.lengths[row]) - 1
        assert played.turn_rewards[row, last] == 3.0
        assert drawn[last]


def test_an_episode_ends_by_its_environment_a_failure_its_turns_or_its_room():
    def of(turn):
        match turn.sample:
            case 0:
                return outcome(turn, done=turn.turn == 1)
            case 1:
                return outcome(turn, done=True, failure="time limit: no reply within 1 s")
            case 2:
                return outcome(turn, ())
        return outcome(turn, np.zeros(ROOM - 20))

    played = play(Scripted(of))
    rollout = played.rollout
    assert played.failed.tolist() == [False, True, False, False] * tiny.PROMPTS
    turns = 2 + 1 + TURNS.max_turns + 2  # by sample; the second reply of the last has no room
    assert played.metrics["turns"] == turns / tiny.GROUP
    full = np.asarray(rollout.lengths).reshape(-1, 4)
    assert (full[:, 3] <= ROOM).all()
    assert unequal(rollout) == 0
    silent = np.asarray(rollout.drawn).sum(1).reshape(-1, 4)[:, 2]
    np.testing.assert_array_equal(silent, full[:, 2])  # empty replies: drawn tokens alone


def test_a_reply_without_room_is_left_out_and_the_episode_counts_as_cut():
    played = play(Scripted(lambda turn: outcome(turn, np.zeros(ROOM), reward=1.0)))
    rollout = played.rollout
    assert rollout.drawn is not None
    assert rollout.drawn.sum() == rollout.lengths.sum()
    assert not rollout.finished.any()
    assert played.rewards.tolist() == [1.0] * tiny.ROWS  # the turn was graded all the same


def test_every_sample_has_a_state_of_its_own():
    begun = [{"told": []} for _ in range(tiny.PROMPTS)]
    seen = []

    def of(turn):
        seen.append(len(turn.state["told"]))
        turn.state["told"].append(turn.completion.text)
        return Outcome(turn.state, np.asarray([7], np.int32), done=turn.turn == 2)

    episodes.play(
        weights(),
        tiny.prompts(),
        jax.random.key(0),
        programs=programs(),
        environment=Scripted(of),
        states=begun,
        text=lambda tokens: "",
    )
    assert sorted(seen) == [0] * tiny.ROWS + [1] * tiny.ROWS + [2] * tiny.ROWS
    assert begun == [{"told": []} for _ in range(tiny.PROMPTS)]


def test_completions_are_what_was_drawn_with_their_end_token_and_keys_of_their_own():
    environment = Replying(2, ending=0.3)  # no turn is cut for want of room
    played = play(environment)
    turns = [turn for call in environment.asked for turn in call]
    assert len({tuple(turn.key.tolist()) for turn in turns}) == len(turns)
    responses = np.asarray(played.rollout.responses)
    for turn in turns:
        tokens, said = turn.completion.tokens, turn.completion.text.split()
        assert turn.completion.ended == (tokens[-1] in SAMPLING.stop_tokens)
        assert len(said) == len(tokens) - turn.completion.ended
        assert turn.completion.ended or len(tokens) == TURNS.max_tokens
        if turn.turn == 0:
            row = turn.prompt * tiny.GROUP + turn.sample
            np.testing.assert_array_equal(responses[row, : len(tokens)], tokens)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1.5], r"a reply must be i32\[n\] tokens"),
        ([[1, 2]], r"a reply must be i32\[n\] tokens"),
        ([23], "a reply has tokens from 23 to 23; the model's are 0 to 22"),
        ([-1, 4], "a reply has tokens from -1 to 4"),
    ],
)
def test_replies_that_are_no_tokens_of_the_model_are_refused(tokens, message):
    with pytest.raises(InputError, match=message):
        play(Scripted(lambda turn: Outcome(None, np.asarray(tokens))))


class Broken:
    def __init__(self, error=None):
        self.error = error

    def outcomes(self, turns):
        yield 0, outcome(turns[0])
        if self.error:
            raise self.error


def test_what_an_environment_in_tokens_raises_ends_the_step():
    with pytest.raises(ZeroDivisionError):
        play(Broken(ZeroDivisionError()))
    with pytest.raises(RuntimeError, match=r"the environment left \d+ of \d+ turns unanswered"):
        play(Broken())


# --- episodes that are cut -------------------------------------------------------------------


class Cutting(Replying):
    """Of some turns it has only the last drawn token left, or another prompt, and begins a row."""

    def outcomes(self, turns):
        for index, found in super().outcomes(turns):
            turn = turns[index]
            rng = np.random.default_rng([*map(int, turn.key), 1])
            start = int(tiny.prompts().lengths[turn.prompt])
            prompt = np.asarray(tiny.prompts().tokens[turn.prompt, :start])
            so_far = np.asarray(turn.state[1] if turn.state else prompt)
            so_far = np.concatenate([so_far, turn.completion.tokens])
            how, anew = rng.integers(6), None
            if how == 0:  # the drawn tokens but the last are dropped
                anew = np.concatenate(
                    [so_far[: -len(turn.completion.tokens)], so_far[-1:], found.tokens]
                )
            elif how == 1:  # another prompt
                anew = np.concatenate([(prompt + 1) % 23, so_far[start:], found.tokens])
            elif how == 2:  # less than a prompt
                anew = prompt[: rng.integers(1, start + 1)]
            tokens = found.tokens if anew is None else found.tokens[:0]
            state = ["", np.concatenate([so_far, tokens]) if anew is None else anew]
            if found.done:
                anew = None
            yield index, replace(found, state=state, tokens=tokens, anew=anew)


@cache
def cut():
    return play(Cutting())


@pytest.mark.parametrize("batching", [ROWS, PAGES, slow(SLOTS)])
def test_every_row_of_an_episode_that_is_cut_has_the_bits_of_one_pass(batching):
    played = play(Cutting(), batching)
    rollout = played.rollout
    assert rollout.parts in (4, 8)
    assert played.metrics["cuts"] > tiny.ROWS
    assert played.metrics["rows"] == 1 + played.metrics["cuts"] / tiny.ROWS
    assert rollout.lengths.shape == (tiny.ROWS * rollout.parts,)
    assert int((rollout.lengths > 0).sum()) <= tiny.ROWS + played.metrics["cuts"]
    assert int(rollout.mask.sum()) > 400
    assert unequal(rollout) == 0
    assert same(rollout, cut().rollout)


def test_a_row_that_is_begun_anew_keeps_what_was_drawn_before_it():
    """Turns are in the rows that they were drawn in, each once, and so are their rewards."""
    environment = Cutting()
    played = play(environment)
    rollout, rewards = played.rollout, played.turn_rewards
    turns = {}
    for turn in (turn for call in environment.asked for turn in call):
        turns.setdefault(turn.prompt * tiny.GROUP + turn.sample, []).append(turn)
    for number, mine in turns.items():
        rows = slice(number * rollout.parts, (number + 1) * rollout.parts)
        drawn = np.asarray(rollout.responses[rows])[np.asarray(rollout.mask[rows])]
        said = [turn.completion.tokens for turn in sorted(mine, key=lambda one: one.turn)]
        assert drawn.tolist() == np.concatenate(said).tolist()
        given = [environment.replies.outcome(turn).reward for turn in mine]
        np.testing.assert_allclose(played.rewards[number], sum(given), rtol=1e-6)
        np.testing.assert_allclose(rewards[rows].sum(), sum(given), rtol=1e-6)
        assert np.asarray(rollout.mask[rows])[rewards[rows] != 0].all()
    np.testing.assert_array_equal(rollout.drawn_lengths, rollout.by_episode(rollout.mask).sum(1))


def test_a_row_that_is_begun_anew_draws_by_other_random_numbers():
    """After the very prompt of the first row."""

    def again(turn):
        start = int(tiny.prompts().lengths[turn.prompt])
        prompt = np.asarray(tiny.prompts().tokens[turn.prompt, :start])
        return replace(outcome(turn, ()), anew=prompt, done=turn.turn == 3)

    rollout = play(Scripted(again)).rollout
    assert rollout.parts == 4
    assert unequal(rollout) == 0
    rows = np.asarray(rollout.responses)[:, :3].reshape(tiny.ROWS, 4, 3)
    different = [len({tuple(row) for row in rows[number]}) for number in range(tiny.ROWS)]
    assert np.mean(different) > 3.5
    assert len({tuple(row) for row in rows.reshape(-1, 3)}) > 0.8 * tiny.ROWS * 4


def test_a_new_row_computes_only_what_differs_from_the_one_before():
    """Its last token is computed by the step that draws the next."""
    expected = []

    def shortened(turn):
        start, drawn = int(tiny.prompts().lengths[turn.prompt]), turn.completion.tokens
        kept = [*drawn[:1], 7, 8, 9]
        if turn.turn == 0:
            alike = [x == y for x, y in zip(drawn, kept, strict=False)]
            there = min(len(drawn) - 1, [*alike, False].index(False), 3)
            expected.append(3 - there)
        prompt = np.asarray(tiny.prompts().tokens[turn.prompt, :start])
        return replace(outcome(turn, (), done=turn.turn == 1), anew=np.asarray([*prompt, *kept]))

    played = play(Scripted(shortened))
    assert played.metrics["cuts"] == len(expected) == tiny.ROWS
    assert played.extended == sum(expected) > 0


def test_a_row_without_room_for_the_conversation_ends_its_episode():
    played = play(Scripted(lambda turn: replace(outcome(turn), anew=np.zeros(200, np.int32))))
    assert played.rollout.parts == 1
    assert not played.rollout.finished.any()
    with pytest.raises(InputError, match="must have a token"):
        play(Scripted(lambda turn: replace(outcome(turn), anew=np.zeros(0, np.int32))))


def test_noise_of_the_dial_is_another_in_every_row():
    dial = mismatch.build([{"name": "log_prob_noise", "std": 0.1}])
    played = play(Cutting(), dial=dial)
    assert same(played.rollout.responses, cut().rollout.responses)
    noise = np.asarray(played.rollout.log_probs - cut().rollout.log_probs)
    there = noise[np.asarray(played.rollout.mask)]
    assert len(np.unique(there)) > 0.95 * len(there)


# --- under the dial --------------------------------------------------------------------------


def test_a_sampler_that_differs_on_purpose_differs_in_every_turn():
    dial = mismatch.build([{"name": "log_prob_noise", "std": 0.1}])
    played = play(dial=dial)
    assert same(played.rollout.responses, reference().rollout.responses)
    assert unequal(played.rollout) > 0.9 * int(played.rollout.mask.sum())


def test_masks_and_lengths_are_of_drawn_tokens():
    rollout = reference().rollout
    assert rollout.drawn is not None
    np.testing.assert_array_equal(rollout.mask, rollout.drawn)
    np.testing.assert_array_equal(rollout.drawn_lengths, rollout.drawn.sum(1))
    assert (rollout.drawn_lengths < rollout.lengths).any()
    hiding = replace(rollout, hidden=rollout.drawn & (np.arange(ROOM)[None, :] == 0))
    np.testing.assert_array_equal(hiding.drawn_lengths, rollout.drawn_lengths)
    assert hiding.mask.sum() < rollout.mask.sum()
