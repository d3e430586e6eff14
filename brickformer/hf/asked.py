"""What a checkpoint asks of whoever writes with it: generation_config.json or, without one, config.json.

    done by itself      which ids open an answer, which are never written, alone or in a row
    said                beams, penalties, drawing: settings of ours of another name, for whoever wants them
    not done            what nothing here does

The ids that open and close are looked for in both files: many folders have them in one alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from brickformer.errors import DataError

Json = Mapping[str, Any]

PENALTIES: Final = {"repetition_penalty": ("repetition", 1.0), "no_repeat_ngram_size": ("no_repeat_ngram", 0)}
DRAWN: Final = {
    "temperature": ("temperature", None),  # ours has a default of its own
    "top_k": ("top_k", 0),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "typical_p": ("typical", 1.0),
}
"""Their names -> ours, and the value that changes nothing."""
THEIRS: Final = {"temperature": 1.0, "top_k": 50}
"""What they do where nothing is said, and we do not."""
UNDONE: Final = {
    "forced_eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "penalty_alpha": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
}
"""What may change an answer and has no counterpart here, and the value at which it does not."""


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """start: the id before the answers of an encoder-decoder. first: the id that each of them begins with. never: ids
    that are not written; never_runs: nor the last of these after the others. said: "width=4", as --set takes it.
    undone: the names of the rest."""

    start: int | None = None
    first: int | None = None
    never: tuple[int, ...] = ()
    never_runs: tuple[tuple[int, ...], ...] = ()
    said: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()


def read_asked(config: Json, generation: Json | None, where: str, *, answers: bool) -> Asked:
    """What is asked for. generation: their generation_config.json, if there is one. answers: of an encoder-decoder.

    Errors: DataError: what is asked for leaves no token.
    """
    own = config if generation is None else generation
    bos, start = (either(config, generation, name) for name in ("bos_token_id", "decoder_start_token_id"))
    ends = either(config, generation, "eos_token_id")
    listed = ends if isinstance(ends, list) else [ends]
    words = own.get("bad_words_ids")
    banned = [tuple(w) for w in words if isinstance(w, list) and w] if isinstance(words, list) else []
    banned = [w for w in banned if all(map(is_id, w)) and not (len(w) == 1 and w[0] in listed)]  # an end is an end
    never = tuple(w[0] for w in banned if len(w) == 1)
    first = own.get("forced_bos_token_id")
    opened = is_id(first) and answers  # theirs means the first token of all, which a decoder is given
    if opened and first in never:
        raise DataError(
            f"{where}: forced_bos_token_id: got {first}, which bad_words_ids forbids: no answer can begin. Remove one."
        )
    undone = [name for name, idle in UNDONE.items() if own.get(name) not in (None, idle)]
    undone += ["forced_bos_token_id"] if is_id(first) and not opened else []
    runs = tuple(w for w in banned if len(w) > 1)
    first = first if opened else None
    start = next((id for id in (start, bos) if is_id(id)), None) if answers else None
    return Asked(start, first, never, runs, tuple(_said(own)), tuple(undone))


def either(config: Json, generation: Json | None, name: str) -> Any:
    """What one of the two says, generation_config.json before config.json."""
    found = (generation or {}).get(name)
    return config.get(name) if found is None else found


def is_id(value: Any) -> bool:
    """Some files say -1 where there is none."""
    return type(value) is int and value >= 0


def _said(own: Json) -> Iterator[str]:
    """Settings of ours that say what theirs say."""
    beams = own.get("num_beams")
    searches = type(beams) is int and beams > 1
    if searches:
        yield f"width={beams}"
        if type(own.get("length_penalty")) in (int, float) and own["length_penalty"] != 1.0:
            yield f"length_penalty={float(own['length_penalty'])}"
        if own.get("early_stopping") is not True:
            yield "early=false"
    drawn = DRAWN if own.get("do_sample") is True and not searches else {}
    for name, (ours, idle) in (PENALTIES | drawn).items():
        value = THEIRS.get(name) if own.get(name) is None else own[name]
        if isinstance(value, int | float) and not isinstance(value, bool) and value != idle:
            yield f"{ours}={value if type(idle) is int else float(value)}"
