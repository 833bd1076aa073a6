"""Whether the tokens of a dataset fit the model: every id needs a row of the table in which it is looked up.

The invariant: ids that do not fit are refused before anything starts, not at the first row that holds one.
"""

from __future__ import annotations

from runner.data.loader import MapDataset
from runner.errors import ConfigError
from strategies.core.graph import OperatorGraph, Source

TOKENS = "input_ids"
"""The batch entry that holds tokens."""


def check_vocabulary(graph: OperatorGraph, dataset: MapDataset) -> None:
    """Compare the attribute `vocabulary` of a dataset, the number of tokens that its entry `input_ids` has, with the
    tables in which a model looks them up. Raises ConfigError for a table that has fewer rows."""
    vocabulary = getattr(dataset, "vocabulary", None)
    if not isinstance(vocabulary, int):
        return
    for operator in graph.operators:
        if operator.op != "embedding":
            continue
        table, tokens = (graph.by_id[ref.id] for ref in operator.operands[:2])
        rows = graph.operand_specs(operator)[0].shape[0]
        if isinstance(tokens, Source) and tokens.kind == "input" and tokens.name == TOKENS and rows < vocabulary:
            raise ConfigError(
                "MW831",
                f"data: the tokenizer has {vocabulary} tokens, but {getattr(table, 'name', operator.name)} of the "
                f"model has {rows} rows. Give the model a vocabulary of {vocabulary} or more (such as "
                f"model.args.vocabulary={vocabulary}), or the data the tokenizer of the model (data.args.tokenizer).",
            )
