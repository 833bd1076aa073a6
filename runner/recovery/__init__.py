"""What a run does when something ends it too early: `stopping` when it is asked to, `restarting` after a failure, on
fewer ranks (`shrinking`) where some are gone for good; `faults` and their `injuries` let failures happen on purpose.

Importing this package imports nothing; `restarting`, `shrinking` and `stopping` import no torch.
"""
