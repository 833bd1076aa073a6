"""The objects that a config names: models, losses, optimizers, pretrained weights, and their precision."""
