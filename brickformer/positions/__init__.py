"""Positions: attention alone cannot tell the order of its keys; these bricks can. Two kinds, two types.

Inside attention (`Position`): turn queries and keys (rotary.py), or add a bias to the scores (bias.py).
At the embedding (`AbsolutePosition`): add a vector to each token (absolute.py).
"""

from brickformer.positions.absolute import (
    AbsolutePosition,
    AbsolutePositionSpec,
    Learned,
    LearnedPosition,
    Randomized,
    RandomPlaces,
    Sinusoid,
    SinusoidPosition,
    sinusoid,
)
from brickformer.positions.base import NoPosition, Position, PositionSpec
from brickformer.positions.bias import Alibi, AlibiPosition, T5Bias, T5BiasPosition, alibi_slopes
from brickformer.positions.rotary import Dynamic, Linear, Llama3, Ntk, Rope, RopePosition, RopeScaling, Yarn

__all__ = [
    "AbsolutePosition",
    "AbsolutePositionSpec",
    "Alibi",
    "AlibiPosition",
    "Dynamic",
    "Learned",
    "LearnedPosition",
    "Linear",
    "Llama3",
    "NoPosition",
    "Ntk",
    "Position",
    "PositionSpec",
    "RandomPlaces",
    "Randomized",
    "Rope",
    "RopePosition",
    "RopeScaling",
    "Sinusoid",
    "SinusoidPosition",
    "T5Bias",
    "T5BiasPosition",
    "Yarn",
    "alibi_slopes",
    "sinusoid",
]
