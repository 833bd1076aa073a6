"""The config as a value: conf/ and the schema agree, strategy forms, the round trip to the ranks."""

import ast
import json
import shutil
from pathlib import Path
from typing import get_args

import hydra
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import runner
from runner.cli import recipes
from runner.cli.verbs import VERBS
from runner.config import generate, keys, schema
from runner.config import load as config
from runner.config.load import Config
from runner.config.origins import Origins
from runner.config.parallel import Mode
from runner.config.section import Section
from runner.config.strategy_syntax import LayoutForm, StrategyForm, read_strategies
from runner.errors import ConfigError, allowed

MINIMAL = ("model.target=a.B", "data.target=a.C", "train.steps=1")
CONF = Path(config.__file__).parents[2] / "conf"


def compose(*overrides: str) -> Config:
    recipes.register()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        return config.load(hydra.compose("config", list(overrides)), Origins(overrides))


def test_environment_variables_are_what_the_key_needs(monkeypatch):
    """OmegaConf reads them as strings."""
    for name, value in (("RANKS", "4"), ("BUCKETS", "1e-3"), ("COMPILE", "true"), ("WRONG", "x4")):
        monkeypatch.setenv(name, value)
    words = ("world_size=${oc.env:RANKS}", "train.seed=${world_size}", "train.clip=${oc.env:BUCKETS}")
    words += ("parallel.mode=data_parallel", "data.batch_size=4")
    made = compose(*MINIMAL, *words, "train.measure_memory=${oc.env:COMPILE}", "+model.args.size=${oc.env:RANKS}")
    assert (made.world_size, made.train.seed, made.train.clip, made.train.measure_memory) == (4, 4, 0.001, True)
    assert made.model.args == {"size": "4"}
    for word in ("world_size=${oc.env:WRONG}", "world_size='4'", "world_size=${oc.env:BUCKETS}"):
        with pytest.raises(ConfigError) as caught:
            compose(*MINIMAL, word)
        assert caught.value.code == "MW204"


def sections() -> list[type[Section]]:
    todo, found = [Config], []
    while todo:
        section = todo.pop()
        found.append(section)
        for info in section.model_fields.values():
            todo += [
                t
                for t in (info.annotation, *get_args(info.annotation))
                if isinstance(t, type) and issubclass(t, Section)
            ]
    return found


def test_every_key_has_a_meaning_and_all_that_hydra_composes_is_a_default():
    for section in sections():
        assert section.model_config["frozen"] and section.model_config["extra"] == "forbid"
    for key in keys.walk():
        assert key.info.description and not key.info.description.endswith("."), key.path
    required = {key.path for key in keys.walk() if key.info.is_required()}
    assert required == {"model", "model.target", "data", "data.target"}
    minimal = {"model": {"target": "a.B"}, "data": {"target": "a.C"}, "train": {"steps": 1}}
    assert compose(*MINIMAL) == Config.model_validate(minimal)


GENERATED = generate.files()


@pytest.mark.parametrize("file", GENERATED, ids=lambda file: file.name)
def test_generated_files_agree_with_the_schema(file):
    assert file.read_text(encoding="utf-8") == GENERATED[file], "run `make generate`"


def test_a_generated_file_that_differs_is_written_anew(tmp_path, monkeypatch, capsys):
    for file in GENERATED:
        (tmp_path / file.relative_to(generate.ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / file.relative_to(generate.ROOT))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    file = tmp_path / "conf/config.yaml"
    right = file.read_text(encoding="utf-8")
    file.write_text(right.replace("log_every: 10 ", "log_every: 20 "), encoding="utf-8")
    assert generate.main(["--check"]) == 1 and "conf/config.yaml differs" in capsys.readouterr().out
    assert generate.main([]) == 0 and file.read_text(encoding="utf-8") == right
    assert generate.main(["--check"]) == 0


def fits(value, node, schema) -> bool:
    """Whether a value is valid under the subset of JSON Schema that the config's schema uses."""
    if "$ref" in node:
        return fits(value, schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
    if "anyOf" in node:
        return any(fits(value, one, schema) for one in node["anyOf"])
    if "enum" in node or "const" in node:
        return value in node.get("enum", [node.get("const")])
    kind = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int}
    if not isinstance(value, kind.get(node.get("type"), (int, float) if node.get("type") == "number" else object)):
        return False
    if isinstance(value, dict):
        known, others = node.get("properties", {}), node.get("additionalProperties", True)
        return all(
            fits(one, known.get(name, others), schema) if name in known or isinstance(others, dict) else others
            for name, one in value.items()
        )
    return not isinstance(value, list) or all(fits(one, node.get("items", {}), schema) for one in value)


@pytest.mark.parametrize("recipe", sorted(recipes.catalogue()))
def test_the_json_schema_takes_every_recipe_and_no_unknown_key(recipe):
    schema = json.loads(GENERATED[generate.ROOT / "docs/reference/config.schema.json"])
    written = OmegaConf.to_container(OmegaConf.load(recipes.catalogue()[recipe]))
    assert fits(written, schema, schema)
    assert not fits(written | {"train": {"stpes": 1}}, schema, schema)
    assert not fits(written | {"parallel": {"zero": {"stage": 4.5}}}, schema, schema)
    assert fits(written | {"parallel": {"zero": 2, "memory_limit": "80GB"}}, schema, schema)


def test_groups_offer_what_the_schema_allows():
    assert {file.stem for file in (CONF / "parallel").glob("*.yaml")} == set(get_args(Mode))
    assert {file.stem for file in (CONF / "job").glob("*.yaml")} == set(get_args(schema.Verb))
    assert {name for name, verb in VERBS.items() if verb.composed} == set(get_args(schema.Verb))


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", get_args(Mode))
def test_mode_as_group_and_as_key_are_the_same(mode):
    words = (*MINIMAL, *(["parallel.server.workers=2"] if mode == "parameter_server" else []))
    assert compose(*words, f"parallel={mode}") == compose(*words, f"parallel.mode={mode}")
    assert compose(*words, f"parallel={mode}").parallel.mode == mode


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("parallel.zero=2", "parallel.zero.stage=2"),
        ("parallel.zero=auto", "parallel.zero.stage=auto"),
        ("parallel.pipeline=auto", "parallel.pipeline.stages=auto"),
        ("parallel.recompute=full", "parallel.recompute.operators=full"),
    ],
)
def test_a_section_in_short_is_its_key_and_the_defaults_of_the_others(short, long):
    both = [compose("+recipe=ffn_auto", "parallel.memory_limit=1GB", one) for one in (short, long)]
    assert both[0] == both[1] != compose("+recipe=ffn_auto", "parallel.memory_limit=1GB")


@pytest.mark.parametrize("size", ["2e9", "2000000000", "'2000000000'", "2GB", "'2 GB'"])
def test_numbers_of_bytes(size):
    assert compose("+recipe=ffn_auto", f"parallel.memory_limit={size}").parallel.memory_limit == 2 * 10**9


def test_config_is_frozen():
    checked = compose(*MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        checked.train.steps = 3


@pytest.mark.few(10)
@pytest.mark.parametrize("recipe", sorted(recipes.catalogue()))
def test_json_round_trip(recipe, tmp_path):
    checked = compose(f"+recipe={recipe}")
    file = tmp_path / "config.json"
    file.write_text(checked.model_dump_json(indent=2), encoding="utf-8")
    assert config.read(file) == checked


VALUES = r"""
  limits: [.inf, -.inf, .nan, -0.0, 1.0, 1e300, 5.0e-324]
  nested: {deep: [{1: a, -2: {true: .inf}}, {1.5: b, .inf: c}, {"1": a}]}
  mixed: {1: int, "one": text}
  large: [123456789012345678901234567890, -9223372036854775809]
  date: 2020-01-01
  bytes: !!binary aGVsbG8=
  marks: [{$float: inf}, {$map: [[1, 2]]}, {$bytes: x}, {$other: 1, a: 2}]
  texts: ["inf", "NaN", "null", "1", "", "\u00e9\u20ac", "\uD800"]
  nothing: [null, {}, [], [[]], true]
"""


def typed(value):
    """A value with its types, so that nan equals itself and 1 equals neither 1.0 nor True."""
    if isinstance(value, dict):
        return [(typed(key), typed(inner)) for key, inner in value.items()]
    return [typed(inner) for inner in value] if isinstance(value, list) else (type(value), repr(value))


def test_arguments_arrive_as_yaml_has_them(tmp_path):
    wanted = OmegaConf.to_container(OmegaConf.create(VALUES))
    values = compose(*MINIMAL).model_dump()
    values["model"] |= {"args": wanted, "config": wanted}
    for section in ("data", "loss", "optimizer"):
        values[section] |= {"args": wanted}
    checked = Config.model_validate(values)
    text = checked.model_dump_json(indent=2)
    json.loads(text, parse_constant=pytest.fail)  # Infinity and NaN are not JSON
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    read = config.read(tmp_path / "config.json")
    assert read.model_dump_json(indent=2) == text
    for one in (checked, read, Config.model_validate(read.model_dump())):
        for args in (one.model.args, one.model.config, one.data.args, one.loss.args, one.optimizer.args):
            assert typed(args) == typed(wanted)
    assert json.loads(text)["model"]["args"]["limits"][:2] == [{"$float": "inf"}, {"$float": "-inf"}]
    assert json.loads(text)["model"]["args"]["mixed"] == {"$map": [[1, "int"], ["one", "text"]]}


@pytest.mark.parametrize("wrong", [{"$float": "much"}, {"$map": [1]}, {"$bytes": "?"}, {"$float": None}])
def test_arguments_that_no_run_wrote_are_refused(tmp_path, wrong):
    values = json.loads(compose(*MINIMAL).model_dump_json())
    values["model"]["args"]["x"] = wrong
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: model\.args"):
        config.read(tmp_path / "config.json")


def test_config_file_that_is_missing_or_wrong(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        config.read(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"world_sizes": 8}', encoding="utf-8")
    with pytest.raises(ConfigError, match="Did you mean 'world_size'"):
        config.read(tmp_path / "config.json")


def test_layouts_must_have_one_number_of_devices_even_if_it_is_open():
    layouts = "parallel.layouts={a:{device_matrix:[2,2],axes:[x,y]},b:{device_matrix:[8],axes:[z]}}"
    with pytest.raises(ConfigError, match=r"parallel\.layouts\.b = \[8\] has 8 devices"):
        compose(*MINIMAL, "parallel=semi_auto", f"+{layouts}")


def test_plan_needs_no_length_of_training():
    assert compose(*MINIMAL[:2], "job=plan").train.steps is None


def test_strategy_forms():
    read = read_strategies(
        {
            "a": [[2, 4], [4, 1]],
            "b.matmul": {"in": [[1], {"layout": "cube", "dims": ["mp", ["sp", "dp"], None]}], "out": [[]]},
            "c": {"out": [[8, 1]]},
        }
    )
    assert read["a"] == StrategyForm(inputs=((2, 4), (4, 1)), outputs=None)
    assert read["b.matmul"].inputs == ((1,), LayoutForm(layout="cube", dims=(("mp",), ("sp", "dp"), ())))
    assert read["b.matmul"].outputs == ((),)
    assert read["c"] == StrategyForm(inputs=None, outputs=((8, 1),))
    assert read_strategies({path: form.model_dump() for path, form in read.items()}) == read
    assert read_strategies(None) == {}


def test_nested_paths_are_flattened_and_the_later_counts():
    nested = {"x": {"y": {"z": [[1]], "@1": [[2]]}}, "x.y.z": [[4]], "layers.*.fc": {"in": [[2]]}}
    assert {path: form.inputs for path, form in read_strategies(nested).items()} == {
        "x.y.@1": ((2,),),
        "x.y.z": ((4,),),
        "layers.*.fc": ((2,),),
    }


COUNTS = st.lists(st.integers(1, 64), max_size=4)
LAYOUTS = st.builds(
    lambda dims: {"layout": "cube", "dims": dims},
    st.permutations(["dp", "sp", "mp"]).map(lambda a: [a[0], [a[1], a[2]], None]),
)
OPERANDS = st.lists(COUNTS | LAYOUTS, min_size=1, max_size=3)
FORMS = OPERANDS | st.fixed_dictionaries({"in": OPERANDS}, optional={"out": OPERANDS})
PATHS = st.from_regex(r"[a-m]{1,3}(\.[n-z]{1,3}){0,2}(@[0-9])?", fullmatch=True)


@given(st.dictionaries(PATHS, FORMS, max_size=4))
def test_every_strategy_reads_back_from_its_own_dump(written):
    read = read_strategies(written)
    assert list(read) == list(written)
    assert read_strategies({path: form.model_dump(mode="json") for path, form in read.items()}) == read


def test_open_mappings():
    found = set(keys.open_mappings())
    assert {"model.args", "parallel.mesh", "parallel.strategies", "parallel.zero.options"} <= found
    assert "parallel" not in found and "train" not in found


def test_children():
    assert keys.children("parallel.zero") == ["stage", "engine", "options"]
    assert keys.children("train.steps") == keys.children("nothing.here") == []
    assert "world_size" in keys.children("")


def test_origins_look_at_the_command_line_last_word_first():
    origins = Origins(("++a.b=1", "a.b=2", "g=x", "+c.d={e:1}"), groups=frozenset({"g"}))
    assert origins.source("a.b") == "the command line: a.b=2"
    assert origins.source("c.d.e") == "the command line: +c.d={e:1}"
    assert origins.source("g.h") is None
    assert origins.source("g") == "the command line: g=x"
    assert origins.sentence(["z"]) == ""


def test_closest_match():
    assert allowed("train", []) == ""
    assert allowed("trian", ["plan", "train"]) == " Allowed: plan, train. Did you mean 'train'?"
    assert allowed("zzz", ["plan"]) == " Allowed: plan."
    assert allowed("zzz", [f"MW{number}" for number in range(200)]).endswith(", ...")
    assert len(allowed("zzz", [f"MW{number}" for number in range(200)])) < 420


def test_missing_value_is_named():
    composed = OmegaConf.create({"model": {"target": "a.B"}, "data": {"target": "???"}})
    with pytest.raises(ConfigError, match=r"data\.target has no value"):
        config.load(composed, Origins())


def test_nothing_of_the_front_end_imports_torch_at_the_top():
    """The command must refuse a bad config before torch is loaded, so these files must not import it at the top."""
    folder = Path(runner.__file__).parent
    for file in (folder / "errors.py", *(folder / "cli").glob("*.py"), *(folder / "config").glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            modules = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
            )
            modules = [module for module in modules if module != "strategies.core.errors"]
            assert not any(m.split(".")[0] in ("torch", "deepspeed", "strategies", "models") for m in modules), file
