"""The chat template of a model, run once, in a process with limits.

A chat template is a program that comes with the model. It may loop for hours, or take all memory. So it does not run
when a question is asked: it runs when the model is loaded, with marks in place of the messages. The messages later
replace the marks.

Deviation: transformers runs the template for every chat. A template whose output depends on the content of a message,
or on the date, gives here what it gives for the marks on the day of loading.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from casemate.errors import DataError

SECONDS = 20  # processor time, most of it to import the library; the process is killed after three times this
MEMORY_BYTES = 4_000_000_000  # address space of the process
CHARACTERS = 100_000  # largest length of what a template adds
SYSTEM, USER = "casematesystemmessage", "casemateusermessage"
_MARKS = re.compile(f"({SYSTEM}|{USER})")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template after its run: its output, split at the marks, with them."""

    pieces: tuple[str, ...]

    @classmethod
    def load(cls, source: str, special_tokens: Mapping[str, Any], model: str) -> ChatTemplate:
        """Runs a template, at most twice: without a system message if it refuses or drops one.

        ``special_tokens`` are variables that it may use, such as ``bos_token``; messages name the model.

        Raises:
            DataError: If it fails, exceeds the limits, or drops the user's message.
        """
        tokens = {name: str(token) for name, token in special_tokens.items() if isinstance(token, str)}
        system = {"role": "system", "content": SYSTEM}
        text, reason = "", ""
        for chat in ([system, {"role": "user", "content": USER}], [{"role": "user", "content": f"{SYSTEM}\n\n{USER}"}]):
            text, reason = _run({"source": source, "tokens": tokens, "chat": chat})
            if SYSTEM in text and USER in text:
                return cls(tuple(_MARKS.split(text)))
        problem = f"refuses the prompt ({reason})" if reason else "drops the question or the documents"
        raise DataError(f"the chat template of {model!r} {problem}; use another model")

    def text(self, system: str, user: str) -> str:
        """The chat as the model reads it.

        >>> ChatTemplate(("<s>", SYSTEM, "</s><u>", USER, "</u>")).text("Be brief.", "Who?")
        '<s>Be brief.</s><u>Who?</u>'
        """
        messages = {SYSTEM: system.strip(), USER: user.strip()}
        return "".join(messages.get(piece, piece) for piece in self.pieces)


def _run(job: Mapping[str, Any]) -> tuple[str, str]:
    """Output of a template, or nothing and the reason."""
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-P",
                "-c",
                f"import sys; sys.path[:0] = {sys.path!r}; from {__name__} import main; main()",
            ],
            input=json.dumps(job).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=3 * SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"it did not end within {3 * SECONDS} seconds"
    if done.returncode:
        return "", f"it did not end within {SECONDS} seconds of processor time, or took too much memory"
    text, reason = json.loads(done.stdout)
    return str(text), str(reason)


def main() -> None:
    """Runs the template that standard input holds; prints its output and the reason of a failure."""
    with suppress(ImportError):  # Windows has no such limits
        import resource

        for what, limit in ((resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, MEMORY_BYTES)):
            with suppress(ValueError, OSError):  # a lower limit is in force
                resource.setrlimit(what, (limit, resource.getrlimit(what)[1]))
    from transformers.utils.chat_template_utils import render_jinja_template

    job = json.loads(sys.stdin.buffer.read())
    try:
        rendered: Any = render_jinja_template(
            [job["chat"]], chat_template=job["source"], add_generation_prompt=True, **job["tokens"]
        )
        text = rendered[0][0]
        found = (text, "") if len(text) <= CHARACTERS else ("", f"it adds more than {CHARACTERS:,} characters")
    except Exception as error:  # a program of others may raise anything
        found = ("", type(error).__name__)
    sys.stdout.write(json.dumps(found))
