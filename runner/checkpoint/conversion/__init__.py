"""Moving a checkpoint to another form or plan without a run: tensor by tensor, no process group, no model.

What is read (`holding`) is anything that tells names, shapes and dtypes and reads any block of any tensor; what is
written (`writing`) is a checkpoint, merged or cut up for a plan. Invariant: no more than `CHUNK` bytes of tensors are
in memory, whatever the size of the model.
"""
