"""Looking at models: what they attend to, what they are made of, what they cost, where training goes."""

from brickformer.look.foreign import foreign
from brickformer.look.maps import Map, Pick
from brickformer.look.view import View, attention
from brickformer.look.watch import Watch

__all__ = ["Map", "Pick", "View", "Watch", "attention", "foreign"]
