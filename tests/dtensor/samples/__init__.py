"""Samples of torch's own tests (`op_db`), run as exported programs and as plans, beside one device.

`calls` makes modules of samples, `on_ranks` runs them on gloo ranks, `__main__` is the command.
"""
