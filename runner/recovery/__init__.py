"""Recovery after a failure: `restarting` from the newest checkpoint, on fewer ranks (`resizing`) if some are
permanently down.

Importing this package imports nothing, and its modules import no torch.
"""
