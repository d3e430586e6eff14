"""brickformer: Transformers assembled from bricks."""
