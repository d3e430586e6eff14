"""What a model learns: made-up digits, text files, pairs of sentences. Each task is a spec that prepares its data."""

from brickformer.tasks.batch import IGNORE, Batch, pad
from brickformer.tasks.files import read_lines, read_pieces, read_stream
from brickformer.tasks.imported import Imported
from brickformer.tasks.pairs import Pairs
from brickformer.tasks.pieces import PiecesTokenizer
from brickformer.tasks.pretrained import PretrainedTokenizer
from brickformer.tasks.reverse import Copy, Reverse, Sort
from brickformer.tasks.seq2seq import Seq2SeqData
from brickformer.tasks.task import Data, Task
from brickformer.tasks.text import Text, TextData, other_text
from brickformer.tasks.tokenizer import (
    BOS,
    EOS,
    PAD,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
    dump_tokenizers,
    load_tokenizers,
)

__all__ = [
    "BOS",
    "EOS",
    "IGNORE",
    "Imported",
    "PAD",
    "Batch",
    "CharTokenizer",
    "Copy",
    "Data",
    "Pairs",
    "PiecesTokenizer",
    "PretrainedTokenizer",
    "Reverse",
    "Seq2SeqData",
    "Sort",
    "Task",
    "Text",
    "TextData",
    "Tokenizer",
    "WordTokenizer",
    "dump_tokenizers",
    "load_tokenizers",
    "other_text",
    "pad",
    "read_lines",
    "read_pieces",
    "read_stream",
]
