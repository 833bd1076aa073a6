"""What a run does after a failure: `restarting` from its newest checkpoint, on fewer ranks (`shrinking`) where some are
down for good.

Importing this package imports nothing, and its modules import no torch.
"""
