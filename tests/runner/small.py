"""The small training run of many tests: a classifier of points on four ranks, as words of the command line, by mode."""

ALONE = ("parallel=stand_alone", "world_size=1")
MODES = {
    "stand_alone": ALONE,
    "data_parallel": ("parallel=data_parallel",),
    "semi_auto": (
        "parallel=semi_auto",
        "parallel.strategies={inner.matmul: [[2,1],[1,2]], outer.matmul: [[2,2],[2,1]]}",
    ),
    "auto": ("parallel=auto", "parallel.strategies.inner.matmul=[[1,2],[2,2]]"),
}
HYBRID = (
    "parallel=hybrid",
    "parallel.mesh={dp: 2, tp: 2}",
    "parallel.dataset_strategy=[[2,1],[2]]",
    "model.target=networks.Hybrid",
)
SMALL = (
    "world_size=4",
    "model.target=networks.Classifier",
    "loss.target=torch.nn.CrossEntropyLoss",
    "data.target=networks.Points",
    "data.batch_size=16",
    "train.steps=6",
)
DOUBLE = "train.precision=fp64"
