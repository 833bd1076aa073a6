"""From graph and plan to the program that each rank runs: lowering, the tree of modules, collectives, gradients,
DeepSpeed.
"""
