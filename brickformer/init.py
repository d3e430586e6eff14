"""Initial values: every one of them, in one function.

placeholder
"""

from __future__ import annotations

from torch import nn

from brickformer.embed import TokenEmbedding
from brickformer.layers import Residual
from brickformer.linear import BranchOut


def initialize(model: nn.Module) -> None:
    """Set every parameter."""
    branches = max(1, sum(isinstance(m, Residual) for m in model.modules()))
    for m in model.modules():
        match m:
            case TokenEmbedding() | nn.Embedding():
                nn.init.normal_(m.weight, std=0.02)
            case BranchOut():
                nn.init.normal_(m.weight, std=0.02 / branches**0.5)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)
            case nn.Linear():
                nn.init.normal_(m.weight, std=0.02)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)
            case _:
                pass
