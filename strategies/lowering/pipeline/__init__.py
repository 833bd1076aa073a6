"""Pipeline parallelism: where a model is cut, the graph and plan of every stage, and the order in which a stage works.

Everything here is a pure function of frozen values; `strategies.runtime.pipeline_stage` carries it out.
"""
