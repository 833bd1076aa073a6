"""Launchers: what starts the ranks of a run on several hosts, or as a site is used to.

`described` says what a config would start, `started` starts it. Every launcher is a pure function in a file of its own;
behind them is one way: `supervise` here, `runner.join` there, and the same rank as `runner.launch` starts. Nothing
here imports torch.
"""
