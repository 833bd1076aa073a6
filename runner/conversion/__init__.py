"""Moving a checkpoint to another form or plan without a run: tensor by tensor, no process group, no model.

`convert` reads checkpoints, files of weights, and DeepSpeed checkpoints (`deepspeed_files`). Invariant: no more than
`runner.checkpoint.writing.CHUNK` bytes of tensors are in memory, whatever the size of the model.
"""
