"""What stands between two turns of the policy, as tokens: the end of one, the reply, an opening.

An episode is one row of tokens that is only appended to, so a chat template must only append too:
what it writes for a conversation must begin with what it wrote for a shorter one. `Bridge` finds
out, once for each kind of reply, by having the template write a few made-up conversations. From
then on a reply is rendered after such a conversation, and what follows the policy's turn in it is
the bridge.

  <|im_start|>user        |  prompt
  2+2?<|im_end|>          |
  <|im_start|>assistant   |
  5<|im_end|>             <- drawn, up to the end token
                          |  bridge: the end token too if the turn was cut
  <|im_start|>user        |
  Try again.<|im_end|>    |
  <|im_start|>assistant   |

Many templates rewrite what was said: they drop the thinking of earlier turns, or move the system
text to the last message. The policy drew its tokens after other ones than such a template would
write now. They are refused, unless the user asks for one of two ways out (`History`).

One of them is to cut. Then the whole conversation is rendered at every turn. Where that begins with
the text so far, the rest of it is the bridge. Where it does not, all of it is what the next turn is
drawn after, in a new row. What was drawn before stays in the old one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.tasks.base import (
    Answer,
    Answering,
    ChatMessage,
    Completion,
    Content,
    History,
    Outcome,
    Turn,
    close,
    failed,
    first_line,
)
from tim_jax.tasks.text import check_kept, encode_text, render_chat
from tim_jax.tasks.tools import CLOSES, OPENS, Call, read_calls

KEPT = 4096  # replies whose bridges are kept
ASKED, SAID, AGAIN = "What is the first question?", "This is said.", "That is said again."
SYSTEM = "What the system is told."
THINKING = "<think>\nThis is thought.\n</think>\n\n"
CALLED, GIVEN = "name_of_a_tool", {"argument": "value"}
WHERE = "a reply"
CUT = 'history = "cut" goes on in a new row there'
WAYS_OUT = (
    ", so that the policy would not have drawn after what it writes now;"
    f' history = "keep" leaves earlier turns as they were drawn, {CUT}'
)


@dataclass(frozen=True, eq=False)
class Talk:
    """The state of an episode whose conversation may be rendered anew.

    Attributes:
      state: the environment's.
      messages: all so far.
      text: what the template writes for them, the opening of the policy's next turn included.
    """

    state: Any
    messages: tuple[ChatMessage, ...] = ()
    text: str = ""


class Bridge:
    """Turns replies into tokens.

    Attributes:
      tokenizer, options: with which prompts are encoded too.
      stop_tokens: with which the policy ends a turn.
      templated: whether prompts go through the chat template. Else a reply is plain text.
      history: what is done about a template that rewrites earlier turns. `refuse` refuses it;
        `keep` leaves earlier turns as they were drawn, whatever the template would make of them;
        `cut` renders every turn, and goes on in a new row where the template does not append.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        stop_tokens: Sequence[int],
        templated: bool,
        options: Mapping[str, Any],
        history: History = "refuse",
    ) -> None:
        self.tokenizer, self.options, self.history = tokenizer, options, history
        self.stop_tokens, self.templated = frozenset(stop_tokens), templated
        self._closing = lru_cache(KEPT)(self._find_closing)
        self._rendered = lru_cache(KEPT)(self._render)

    def check(self, roles: Sequence[str]) -> None:
        """Refuses a template that does not only append replies with messages of these roles.

        Raises:
          InputError: it rewrites earlier turns, and how.
        """
        if self.templated and roles:
            self._closing(tuple(roles))

    def check_calls(self) -> None:
        """Refuses a template that writes a call of a tool in a way that is not read.

        Raises:
          InputError: it does, and how.
        """
        if not self.templated or getattr(self.tokenizer, "response_template", None) is not None:
            return
        texts = []
        for arguments in (GIVEN, json.dumps(GIVEN)):  # templates take one of them
            with suppress(InputError):
                texts.append(self._written_call(arguments))
        told = [text for text in texts if CALLED in text]  # others know nothing of calls
        read = [read_calls(Completion(text, np.zeros(0, np.int32), ended=True)) for text in told]
        if told and [Call(CALLED, GIVEN)] not in read:
            raise InputError(
                f"tools: the chat template writes a call as {shown(told[0])}, which is not read"
                " without a response template; set tokenizer.response_template, or write a"
                " respond of your own that reads calls"
            )

    def tokens(self, completion: Completion, content: Content) -> np.ndarray:
        """Returns what follows a completion up to the next turn of the policy, i32[n].

        Tokens are taken as they are. Text is a user's message.

        Raises:
          InputError: the reply cannot be rendered or encoded.
        """
        messages = _messages(content)
        if not messages:
            return self._check_tokens(content)
        if not self.templated:
            text = "\n\n".join(str(message["content"]) for message in messages)
            ids = self._encode(text)
            return np.array(ids if completion.ended else [*self._end, *ids], np.int32)
        ids, end = self._rendered(json.dumps(messages))
        return ids[end:] if completion.ended else ids

    @property
    def cuts(self) -> bool:
        """Whether episodes are cut where the template rewrites what was said."""
        return self.templated and self.history == "cut"

    def begin(self, state: Any, asked: Any) -> Talk:
        """The conversation of a prompt, text or messages, and the environment's state."""
        messages = (_user(asked),) if isinstance(asked, str) else tuple(map(asdict, asked))
        return Talk(state, messages, self._write(*messages))

    def go_on(
        self, talk: Talk, completion: Completion, content: Content
    ) -> tuple[Talk, np.ndarray, np.ndarray | None]:
        """The conversation after a turn of the policy and a reply to it, in text or messages.

        Returns:
          The conversation; what is appended i32[n]; and if that cannot be, all tokens anew, i32[m].

        Raises:
          InputError: the reply cannot be rendered or encoded, or is tokens.
        """
        reply = _messages(content)
        if not reply:
            raise InputError(f'{WHERE} is tokens, which history = "cut" cannot render anew')
        drawn = completion.tokens[:-1] if completion.ended else completion.tokens
        said = str(self.tokenizer.decode(drawn.tolist(), skip_special_tokens=False))
        messages = (*talk.messages, completion.message or _said(said), *reply)
        after = Talk(talk.state, messages, self._write(*messages))
        check_kept(reply, after.text, WHERE)
        so_far, closing = f"{talk.text}{said}", self._closing(_roles(reply))
        if closing is not None and after.text.startswith(so_far):
            ids = self._encode(after.text[len(so_far) :])
            if tuple(ids[: len(closing)]) == closing:
                start = len(closing) if completion.ended else 0
                return after, np.array(ids[start:], np.int32), None
        return after, np.zeros(0, np.int32), np.array(self._encode(after.text), np.int32)

    def read(self, completion: Completion) -> Completion:
        """Returns the completion with what the tokenizer's response template reads in it.

        And with what the chat template has opened ahead of it.
        """
        opened = self._ahead.rstrip().endswith(OPENS) and self._shows_ends_of_thoughts
        completion = replace(completion, thinking=opened)
        template = getattr(self.tokenizer, "response_template", None)
        if template is None:
            return completion
        text = self.tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=False)
        try:
            tools = self.options.get("tools")
            message = self.tokenizer.parse_response(text, prefix=self._ahead, tools=tools)
        except Exception as error:  # the policy wrote it
            message = {"role": "assistant", "content": completion.text, "error": first_line(error)}
        return replace(completion, message=message)

    @cached_property
    def _shows_ends_of_thoughts(self) -> bool:
        """False if the end of a thought is a special token, which no completion's text has."""
        text = self.tokenizer.decode(self._encode(CLOSES), skip_special_tokens=True)
        return CLOSES in str(text)

    @cached_property
    def _ahead(self) -> str:
        """What stands ahead of a turn of the policy."""
        return self._write(_user(ASKED)) if self.templated else ""

    @property
    def _end(self) -> list[int]:
        """The end token of a turn without a template, which is added to one that was cut."""
        usual = self.tokenizer.eos_token_id
        return [usual] if usual in self.stop_tokens else sorted(self.stop_tokens)[:1]

    def _check_tokens(self, content: Any) -> np.ndarray:
        size = len(self.tokenizer)
        for token in content:
            if not 0 <= token < size:
                raise InputError(f"{WHERE} has token {token}, the vocabulary has {size}")
        return np.array(content, np.int32)

    def _render(self, reply: str) -> tuple[np.ndarray, int]:
        """A reply's bridge after a turn that was cut, and how much of it one that ended has."""
        messages: list[ChatMessage] = json.loads(reply)
        closing = self._closing(_roles(messages)) or ()
        after = self._after(messages)
        check_kept(messages, after, WHERE)
        ids = self._encode(after)
        if tuple(ids[: len(closing)]) != closing:
            raise InputError(f"{WHERE}: the end of the turn before it depends on what follows")
        return np.array(ids, np.int32), len(closing)

    def _find_closing(self, roles: Sequence[str]) -> tuple[int, ...] | None:
        """The tokens that end a turn of the policy, up to its end token, where these roles reply.

        None if the template leaves such turns out, where episodes are cut.

        Raises:
          InputError: the template does not only append such replies.
        """
        reply = [{"role": role, "content": f"Reply {i}."} for i, role in enumerate(roles)]
        for message in reply:
            if message["role"] == "tool":  # as `tools` says it; some templates write it
                message["name"] = CALLED
        if self.cuts:
            text = self._write(_user(ASKED), _said(SAID), *reply)
            if SAID not in text.partition(ASKED)[2]:
                return None
        elif fault := self._fault(reply):
            raise InputError(f"episodes of several turns: the chat template {fault}")
        # Ahead of the reply's text only the policy's turn can end.
        ahead = self._encode(self._after(reply).partition("Reply 0.")[0])
        ends = [i + 1 for i, token in enumerate(ahead) if token in self.stop_tokens]
        return tuple(ahead[: ends[0]]) if ends else ()

    def _fault(self, reply: Sequence[ChatMessage]) -> str:
        """Why such replies cannot be appended, or nothing."""
        if changes := self._changes(reply):
            return f"{changes}; {CUT}"
        return self._rewrites(reply) if self.history == "refuse" else ""

    def _encode(self, text: str) -> list[int]:
        return encode_text(self.tokenizer, text, where=WHERE)

    def _write(self, *chat: ChatMessage) -> str:
        return render_chat(self.tokenizer, [*chat], self.options, where=WHERE)

    def _written_call(self, arguments: Any) -> str:
        """The text of a turn that calls a tool, as a completion has it."""
        function = {"name": CALLED, "arguments": arguments}
        call = {"type": "function", "id": "123456789", "function": function}
        text = self._write(_user(ASKED), {**_said(""), "tool_calls": [call]}).rpartition(ASKED)[2]
        opening = self._write(_user(ASKED)).rpartition(ASKED)[2]
        ids = self._encode(text.removeprefix(opening))
        said = [*takewhile(lambda token: token not in self.stop_tokens, ids)]
        return str(self.tokenizer.decode(said, skip_special_tokens=True))

    def _after(self, reply: Sequence[ChatMessage]) -> str:
        """What the template writes after a turn of the policy to which this is the reply."""
        text = self._write(_user(ASKED), _said(SAID), *reply)
        return text[text.index(SAID, text.index(ASKED)) + len(SAID) :]

    def _changes(self, reply: Sequence[ChatMessage]) -> str:
        """How the template writes replies that could not follow what was drawn; or nothing."""
        begun = _user(ASKED), _said(SAID), *reply
        text = self._write(*begun)
        if ASKED not in text or SAID not in text.partition(ASKED)[2]:
            return "leaves out or changes what was said in earlier turns"
        after = self._after(reply)
        later = self._write(*begun, _said(AGAIN), *reply)
        if later.partition(AGAIN)[2] != after:
            return "writes a reply in another way later in the conversation"
        with suppress(InputError):  # one without a place for a system's text
            told = self._write({"role": "system", "content": SYSTEM}, *begun)
            if SYSTEM in told.rpartition(SAID)[2]:
                return "moves the system's text behind earlier turns"
        return ""

    def _rewrites(self, reply: Sequence[ChatMessage]) -> str:
        """How the template rewrites what was said before a reply, or nothing."""
        asked = self._write(_user(ASKED))
        for said, what in ((SAID, ""), (THINKING + SAID, "drops the thinking of earlier turns")):
            drawn = f"{asked}{said}"
            text = self._write(_user(ASKED), _said(said), *reply)
            if not text.startswith(drawn):
                return f"{what or _difference(asked, text)}{WAYS_OUT}"
            again = self._write(_user(ASKED), _said(said), *reply, _said(said), *reply)
            if not again.startswith(f"{text}{said}"):
                return f"rewrites a turn once two more have followed{WAYS_OUT}"
        return ""


def _difference(asked: str, text: str) -> str:
    """How a conversation does not begin with its first message and the opening of a turn."""
    same = next(i for i in range(len(asked) + 1) if asked[: i + 1] != text[: i + 1])
    gone = shown(asked[same:])
    if text[same:].startswith(SAID):
        return f"drops {gone}, with which it opens a turn, from earlier turns"
    return f"writes {shown(text[same:].partition(SAID)[0])} for {gone} in earlier turns"


def _user(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


def _said(content: str) -> ChatMessage:
    return {"role": "assistant", "content": content}


def _roles(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    return tuple(str(message["role"]) for message in messages)


def _messages(content: Content) -> list[ChatMessage]:
    """A reply as messages; none if it is tokens."""
    if isinstance(content, str):
        return [_user(content)]
    return [dict(item) for item in content if isinstance(item, Mapping)]


@dataclass(frozen=True)
class Bridged:
    """An environment in tokens: one that answers in text, and the bridge.

    Raises:
      InputError: when made, if the template rewrites earlier turns, or if tools are called and it
        writes calls in a way that is not read.
    """

    source: Answering
    bridge: Bridge

    def __post_init__(self) -> None:
        self.bridge.check(self.source.roles)
        if self.source.reads_calls:
            self.bridge.check_calls()

    def outcomes(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Outcome]]:
        """Yields (index in `turns`, outcome) for each, in the order in which they are there."""
        talks = [self._talk(turn) for turn in turns]
        read = [
            replace(turn, completion=self.bridge.read(turn.completion), state=talk.state)
            for turn, talk in zip(turns, talks, strict=True)
        ]
        for index, answer in self.source.answers(read):
            yield index, self._outcome(read[index].completion, talks[index], answer)

    def close(self) -> None:
        """Ends the environment's processes, if it has some."""
        close(self.source)

    def _talk(self, turn: Turn) -> Talk:
        if isinstance(turn.state, Talk):
            return turn.state
        return self.bridge.begin(turn.state, turn.asked) if self.bridge.cuts else Talk(turn.state)

    def _outcome(self, completion: Completion, talk: Talk, answer: Answer) -> Outcome:
        tokens, anew, state = np.zeros(0, np.int32), None, answer.state
        if not answer.done:
            try:
                if self.bridge.cuts:
                    after, tokens, anew = self.bridge.go_on(talk, completion, answer.content)
                    state = replace(after, state=answer.state)
                else:
                    tokens = self.bridge.tokens(completion, answer.content)
            except InputError as error:
                what = str(error).removeprefix(WHERE).removeprefix(":").strip()
                answer = failed(talk.state, "reply", what)
                state = answer.state
        return Outcome(state, tokens, answer.reward, answer.done, answer.failure, anew)
