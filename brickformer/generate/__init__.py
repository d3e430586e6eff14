"""Generation: prompts in, answers out, for decoders, encoder-decoders and any mixer that keeps the state contract."""

from brickformer.generate.beam import Beam, beam_search
from brickformer.generate.draft import PromptLookup
from brickformer.generate.engine import generate
from brickformer.generate.prefix import Prefix, read_prompt
from brickformer.generate.result import Generation, Result, Stats, Tokenizer
from brickformer.generate.score import Score, score
from brickformer.generate.settings import GREEDY, UNTIL, Sampling, Stop
from brickformer.generate.speculative import speculate
from brickformer.generate.stream import Stream, stream
from brickformer.generate.writer import Prompt, Writer

__all__ = [
    "GREEDY",
    "UNTIL",
    "Beam",
    "Generation",
    "Prefix",
    "PromptLookup",
    "Prompt",
    "Result",
    "Sampling",
    "Score",
    "Stats",
    "Stop",
    "Stream",
    "Tokenizer",
    "Writer",
    "beam_search",
    "generate",
    "read_prompt",
    "score",
    "speculate",
    "stream",
]
