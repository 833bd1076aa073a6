"""The searches: strategies for all operators of a graph that minimise the step time within the memory limit.

                   problem             elimination                        1  search problem; factor graphs
                      |                     |
       +--------------+---------------------+-----+----------+
   plan_cost   strategy_space    equivalence_classes   dual_bound         2  costs, candidates, classes, bounds
       |              |                   |              |
   mesh_choice    cost_graph    deferral  |              |                3  factorisations; variables; later sums
       |              |                   |              |
       +------+-------+-------------------+-------+------+
              |                                   |
    recursive_programming                dynamic_programming              4  one axis per round; exact on three axes
              |                                   |
    sharding_propagation                      algorithms                  5  from configured operators; registry

    joint stands alone: it optimises ZeRO, pipelines and recompute jointly with plans.

One cost graph: a variable per operator with its candidate strategies, factors of seconds from
`strategies.cost.resharding_matrix` and `strategies.cost.roofline`. One solver: elimination, where repeated blocks share
their minima, or message passing and reduced-cost fixing where that is too wide. One memory limit: a Lagrange multiplier
in seconds per byte. Three algorithms: dynamic programming, recursive programming, sharding propagation.
"""
