"""The shipped recipes, the group `recipe`, and the verb that lists them."""

from pathlib import Path

import hydra
import pytest
from hydra.core.object_type import ObjectType

from runner.cli import recipes
from runner.config import load as config
from runner.config.origins import Origins

NAMES = [
    "advanced_layout",
    "bert_finetune",
    "boundary",
    "data_parallel",
    "distillation",
    "ffn_auto",
    "ffn_fused",
    "gpt",
    "gpt_interleaved",
    "gpt_long",
    "gpt_multi_copy",
    "gpt_offload_disk",
    "gpt_offload_host",
    "gpt_packed",
    "gpt_padded",
    "gpt_pipeline",
    "gpt_recompute",
    "hf_gpt2",
    "hf_llama",
    "hybrid_matmul",
    "layout_out_strategy",
    "llama",
    "llama_8b",
    "llama_lora",
    "mae_784",
    "megatron_sp",
    "megatron_tp",
    "mesh_2d",
    "mesh_3d",
    "moe",
    "parameter_server",
    "quickstart",
    "reduce_mean",
    "resnet",
    "resnet_images",
    "semi_auto_matmul",
    "semi_auto_redistribution",
    "unet_tiles",
    "vit",
    "vit_images",
    "vocab_ffn",
    "zero",
]


def compose(*overrides: str) -> config.Config:
    recipes.register()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        return config.load(hydra.compose("config", list(overrides)), Origins(overrides))


def test_names():
    assert list(recipes.catalogue()) == NAMES


@pytest.mark.few(8)
@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_valid_and_says_what_it_shows(name):
    config = compose(f"+recipe={name}")
    assert config.world_size in (2, 4, 7, 8) or (config.world_size is None and config.cluster.machine is not None)
    file = recipes.catalogue()[name]
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1] == f"# {recipes.description(file)}"
    assert 20 < len(recipes.description(file)) < 100
    assert lines[2:4][0] == "#" and lines[3].startswith("# "), "a recipe explains what it shows"


@pytest.mark.slow
def test_configured_strategies_of_the_recipes():
    strategies = {name: compose(f"+recipe={name}").parallel.strategies for name in NAMES}
    assert strategies["quickstart"]["matmul"].inputs == ((2, 4), (4, 1))
    assert {path: form.inputs for path, form in strategies["ffn_auto"].items()} == {
        "dense1.matmul": ((2, 4), (4, 1)),
        "dense3.matmul": ((1, 8), (8, 1)),
    }
    assert {path: form.inputs for path, form in strategies["semi_auto_redistribution"].items()} == {
        "matmul1": ((1, 1), (1, 2)),
        "matmul2": ((8, 1), (1, 1)),
    }
    assert list(strategies["advanced_layout"]) == ["matmul1", "relu1", "matmul2", "relu2"]
    (out,) = strategies["layout_out_strategy"]["matmul"].outputs
    assert (out.layout, out.dims) == ("cube", (("mp", "sp", "dp"), ()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stages_by_override(stage):
    assert compose("+recipe=zero", f"parallel.zero.stage={stage}").parallel.zero.stage == stage


def test_recipes_layer():
    layered = compose("+recipe=[zero,data_parallel]")
    assert (layered.optimizer.target, layered.parallel.zero.stage) == ("torch.optim.SGD", 1)


def test_recipes_of_the_working_directory(command, tmp_path):
    (tmp_path / "recipes" / "deep").mkdir(parents=True)
    (tmp_path / "recipes" / "deep" / "mine.yaml").write_text(
        "# @package _global_\n# Mine\ndefaults: [/recipe/quickstart, _self_]\ntrain: {steps: 77}\n", encoding="utf-8"
    )
    assert "  deep/mine" in command("recipes").out
    assert "steps: 77" in command("+recipe=deep/mine", "--cfg", "job").out


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["recipes", "user/recipe"])
def test_a_recipe_of_the_user_wins_over_a_shipped_one(command, job, tmp_path, place):
    seen = []
    job(lambda config, run_dir: seen.append(config.train.steps))
    (tmp_path / place).mkdir(parents=True)
    text = "# @package _global_\n# Mine\ndefaults: [zero, _self_]\ntrain: {steps: 77}\n"
    (tmp_path / place / "quickstart.yaml").write_text(text, encoding="utf-8")
    option = ("--config-dir", "user") if place != "recipes" else ()
    done = command(*option, "+recipe=quickstart")
    (line,) = [line for line in done.out.splitlines() if line.startswith("recipe: ")]
    assert f"{place}/quickstart.yaml" in line
    done = command(*option, "+recipe=zero")
    assert (done.code, done.out) == (0, ""), done.err
    done = command("-m", *option, "+recipe=quickstart,zero", "train.seed=1")
    assert (done.code, done.out.count("recipe: ")) == (0, 1), done.err
    assert seen[0] == 77 and seen[2] == 77


def test_the_catalogue_shows_the_users(command, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").write_text(
        "# @package _global_\n# Mine\ntrain: {steps: 7}\n", encoding="utf-8"
    )
    lines = command("recipes").out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES and "  Mine" in lines[NAMES.index("quickstart")]
    assert "# Mine" in command("recipes", "quickstart").out


def test_a_recipe_that_builds_on_itself_is_refused(command, tmp_path):
    (tmp_path / "recipes").mkdir()
    text = "# @package _global_\ndefaults: [/recipe/quickstart, _self_]\ntrain: {steps: 7}\n"
    (tmp_path / "recipes" / "quickstart.yaml").write_text(text, encoding="utf-8")
    done = command("+recipe=quickstart")
    assert done.code == 2 and len(done.paragraphs) == 1 and "recipes/quickstart.yaml" in done.paragraphs[0]


@pytest.mark.parametrize(
    ("defaults", "parallel", "mesh"),
    [
        ("defaults: [mesh_2d, _self_]", "mesh: {tp: 8}", {"tp": 8}),
        ("defaults: [mesh_2d]", "mesh: {tp: 2, dp: 4}", {"tp": 2, "dp": 4}),
        ("defaults: [mesh_2d, {override /cluster: a100}, _self_]", "mesh: {tp: 8}", {"tp": 8}),
        ("defaults: [_self_, mesh_2d]", "mesh: {tp: 8}", {"dp": 4, "tp": 2}),
        ("defaults: [{override /parallel: auto}]", "mesh: {tp: 8}", {"tp": 8}),
        ("defaults: []", "mesh: {tp: 8}", {"tp": 8}),
        ("defaults: [mesh_2d, _self_]", "search: dynamic_programming", {"dp": 4, "tp": 2}),
    ],
)
def test_a_mesh_of_a_recipe_replaces_that_below_it(tmp_path, monkeypatch, defaults, parallel, mesh):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    text = f"# @package _global_\n{defaults}\nparallel: {{{parallel}}}\n"
    (tmp_path / "recipes" / "mine.yaml").write_text(text, encoding="utf-8")
    recipes.register()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        found = hydra.compose("config", ["+recipe=mine"]).parallel.mesh
        both = hydra.compose("config", ["+recipe=[mesh_2d,mine]"]).parallel.mesh if "mesh_2d" not in defaults else mesh
    assert found == both == mesh and list(found) == list(mesh)


def test_recipes_of_a_config_directory(command, tmp_path):
    (tmp_path / "user" / "recipe").mkdir(parents=True)
    (tmp_path / "user" / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [quickstart, _self_]\ntrain: {stepz: 7}\n", encoding="utf-8"
    )
    done = command("--config-dir", "user", "+recipe=mine")
    assert done.code == 2
    assert "Did you mean 'steps'? (from recipe/mine)" in done.paragraphs[0]


def test_verb_lists_and_prints(command):
    listed = command("recipes").out.splitlines()
    assert [line.split()[0] for line in listed] == NAMES
    assert command("recipes", "zero").out == recipes.catalogue()["zero"].read_text(encoding="utf-8")


def test_source_serves_one_group():
    source = recipes.RecipeSource(provider="test", path=f"recipes://{recipes.shipped()}")
    assert source.available()
    assert source.is_group("") and source.is_group("recipe") and not source.is_group("other")
    assert source.is_config("recipe/zero") and not source.is_config("zero") and not source.is_config("recipe/none")
    assert source.list("", ObjectType.GROUP) == ["recipe"]
    assert source.list("", ObjectType.CONFIG) == []
    assert source.list("recipe", ObjectType.CONFIG) == NAMES
    assert source.list("other", None) == []


def test_a_file_without_comment_has_no_description(tmp_path):
    file = Path(tmp_path, "bare.yaml")
    file.write_text("# @package _global_\ntrain: {}\n# late\n", encoding="utf-8")
    assert recipes.description(file) == ""


def test_a_recipe_that_cannot_be_read_leaves_the_others(command, tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "latin.yaml").write_bytes(b"# @package _global_\n# caf\xe9\nworld_size: 2\n")
    (folder / "gone.yaml").symlink_to(tmp_path / "nothing")
    (folder / "marked.yaml").write_bytes(b"\xef\xbb\xbf# @package _global_\n# Mine\ndefaults: [quickstart, _self_]\n")
    lines = {line.split()[0]: line for line in command("recipes").out.splitlines()}
    assert "(cannot be read)" in lines["latin"] and "(cannot be read)" in lines["gone"] and "Mine" in lines["marked"]
    assert "latin" in command("--help").out
    for name in ("latin", "gone"):
        done = command("recipes", name)
        assert done.code == 2 and "MW111" in done.err
    assert command("plan", "+recipe=marked", "--cfg", "job").code == 0
