"""The searches: strategies for all operators of a graph that minimise the step time within the memory limit.

    elimination       equivalence_classes      solution       deferral     1  factors, classes, results, later sums
     |       |                 |                  |              |
     |       |                 +---------+--------+              |
     |       |                           |                       |
strategy_space   dual_bound         mesh_choice                  |         2  candidates, bounds, factorisations
     |               |                   |                       |
     |               +---------+---------+                       |
     |                         |                                 |
cost_graph           recursive_programming                       |         3  variables; one axis per round
     |                         |                                 |
dynamic_programming            |                                 |         4  exact on three axes
     |                         |                                 |
     +-------------------------+------+--------------------------+
     |                                |
algorithms                  sharding_propagation                           5  registry; from configured operators

    joint stands alone: it optimises ZeRO, pipelines and recompute jointly with plans.

One cost graph: a variable per operator with its candidate strategies, factors of seconds from
`strategies.cost.resharding_matrix` and `strategies.cost.roofline`. One solver: elimination, where repeated blocks share
their minima, or message passing and reduced-cost fixing where that is too wide. One memory limit: a Lagrange multiplier
in seconds per byte. Three algorithms: dynamic programming, recursive programming, sharding propagation.
"""
