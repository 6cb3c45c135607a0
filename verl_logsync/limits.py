"""How long W&B lets the words of a run be: what is longer is cut when it is sent, and said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

#: Characters of a run's name and group; of a tag and a job type.
LONGEST_NAME: Final = 128
LONGEST_TAG: Final = 64


def tags_within(tags: Iterable[str]) -> list[str]:
    """The tags that W&B takes, each once; empty ones are none."""
    return [tag[:LONGEST_TAG] for tag in dict.fromkeys(tags) if tag]


def cut_notes(
    *, name: str = "", group: str = "", job_type: str = "", tags: Sequence[str] = ()
) -> Iterator[str]:
    """What is cut of a run's words, for the user."""
    words = [("name", name, LONGEST_NAME), ("group", group, LONGEST_NAME)]
    words.append(("job type", job_type, LONGEST_TAG))
    words.extend(("tag", tag, LONGEST_TAG) for tag in tags)
    for what, word, limit in words:
        if len(word) > limit:
            yield (
                f"the {what} {word[:20]}... has {len(word)} characters: W&B takes {limit}, "
                "the rest is cut"
            )
    if "" in tags:
        yield "an empty tag is left out: W&B takes none"
