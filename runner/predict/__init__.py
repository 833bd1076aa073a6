"""Inference: the model of a config, with the weights of any checkpoint, on rows of any dataset, in any plan.

Prediction is an evaluation without training: the same programs, the same batches, the same scores. Invariant:
predictions are in the order of the rows and do not depend on the plan.
"""
