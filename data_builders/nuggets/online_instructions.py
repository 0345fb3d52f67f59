"""What a language model is asked for when nuggets are extracted for one question.

Two styles, after the first stage of published pipelines; words and example are ours. `ginger`
(GINGER, Łajewska and Balog, 2025): the spans of a passage that help to answer. `crucible`
(Crucible, Dietz et al., 2026): questions that the passage answers, each with its answer. Lines are
asked for and not JSON: small models close a list of lines more often than one of JSON strings.
Answers are read by `instructions.parse_candidates`.
"""

import hashlib
import json
from typing import Literal

from data_builders.nuggets.instructions import Messages

Style = Literal["ginger", "crucible"]

_TASKS: dict[Style, str] = {
    "ginger": (
        "Which phrases of the text help to answer the question? Copy each word for word from the "
        "text, a whole clause of at most 25 words, one a line, at most five. "
        "If none helps, write [] alone."
    ),
    "crucible": (
        "Which facts of the text help to answer the question? Write each as a short question with "
        "its answer from the text, one pair a line, at most five. If none helps, write [] alone."
    ),
}
_EXAMPLE_QUESTION = "Where was the architect of the Hartsby opera house born?"
_EXAMPLE_TEXT = (
    "Ilka Brandt\nIlka Brandt (born 4 May 1921 in Torvik) was a Valdian architect. She designed "
    "the Hartsby opera house, which opened in 1958. Brandt taught at the Orrin academy until 1980."
)
_EXAMPLE_ANSWERS: dict[Style, str] = {
    "ginger": (
        "- Ilka Brandt (born 4 May 1921 in Torvik) was a Valdian architect\n"
        "- She designed the Hartsby opera house"
    ),
    "crucible": (
        "- Who designed the Hartsby opera house? Ilka Brandt\n- Where was Ilka Brandt born? Torvik"
    ),
}


def question_messages(style: Style, question: str, text: str) -> Messages:
    """The chat turns that ask what a text says to a question, with one worked example."""
    return [
        {"role": "user", "content": _asked(style, _EXAMPLE_QUESTION, _EXAMPLE_TEXT)},
        {"role": "assistant", "content": _EXAMPLE_ANSWERS[style]},
        {"role": "user", "content": _asked(style, question, text)},
    ]


def _asked(style: Style, question: str, text: str) -> str:
    return f"Text:\n{text.strip()}\n\nQuestion: {question}\n\n{_TASKS[style]}"


# What is asked: part of the identity of the nuggets that come of it.
QUESTION_PROMPT_VERSION = hashlib.sha256(
    json.dumps([question_messages(style, "", "") for style in sorted(_TASKS)]).encode()
).hexdigest()
