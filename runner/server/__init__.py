"""Mode parameter_server: servers hold parts of the parameters and their optimizer states, workers compute gradients of
slices of the batch (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014).

Rank 0 coordinates (`coordinator`), the next ranks serve (`store`), the others work (`worker`). Nobody is in a process
group with another, so any rank but rank 0 may be killed at any moment and come back.
"""
