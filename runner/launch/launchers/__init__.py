"""Launchers: they start the ranks of a run on several hosts, or with a site's own tools.

`described` describes the processes of a config, `started` starts them. Every launcher is a pure function in a separate
file; the rest is shared: `supervise` here, `runner.join` on the hosts, and the same rank as `runner.launch` starts.
Nothing here imports torch.
"""
