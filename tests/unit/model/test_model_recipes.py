"""If these break: a ready model is not the published one."""

import pytest

from myriad.checkpoint.foreign.hugging_face_config import kind_of
from myriad.errors import BadInputError
from myriad.job import Job, load_job, recipe_names
from myriad.model.config import ModelConfig

PUBLISHED = {
    "gpt2-124m": 124.4e6,
    "gpt2-355m": 354.8e6,
    "gpt2-774m": 774.0e6,
    "gpt2-1558m": 1557.6e6,
    "gpt-13b": 12.85e9,
    "megascale-175b": 175e9,
    "megascale-530b": 530e9,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.6e9,
    "llama3-405b": 405.9e9,
    "megascale-moe-352b": 352e9,
}
EXACT = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-7b-a1b": 6_919_161_856,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "phi3-mini": 3_821_079_552,
    "phi4-14b": 14_659_507_200,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "pythia-160m": 162_322_944,
    "pythia-1.4b": 1_414_647_808,
    "pythia-6.9b": 6_857_302_016,
    "minicpm-2b": 2_724_880_896,
    "olmo3-7b": 7_298_011_136,
    "stablelm2-12b": 12_143_185_920,
    "falcon-40b": 41_303_293_952,
    "afm-4.5b": 4_619_184_640,
    "granite3-2b": 2_533_531_648,
    "granite3-8b": 8_170_848_256,
    "stablelm2-1.6b": 1_644_515_328,
    "falcon-7b": 6_921_720_704,
}
"""Parameters of the published weights without prediction layers, a shared table counted once."""


def model(name: str) -> ModelConfig:
    return load_job("tiny", [f"model={name}"]).model


def test_every_recipe_that_is_not_tiny_has_a_published_size():
    assert {name for name in recipe_names("models") if not name.startswith("tiny")} == {*PUBLISHED, *EXACT}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_as_published(name):
    assert model(name).num_parameters() == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", sorted(EXACT))
def test_recipes_of_published_weights_have_their_number_of_parameters(name):
    assert model(name).without_predictions().num_parameters() == EXACT[name]


@pytest.mark.parametrize("name", sorted(EXACT))
def test_every_published_model_has_a_hugging_face_family(name):
    families = {"llama2": "llama", "llama3.1": "llama", "llama3.2": "llama", "mistral": "mistral"}
    families |= {"qwen2.5": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
    families |= {"olmo2": "olmo2", "phi3": "mistral", "phi4": "llama", "smollm2": "llama"}
    families |= {"smollm3": "smollm3", "pythia": "gpt_neox", "granite3": "granite"}
    families |= {"stablelm2": "stablelm", "falcon": "falcon", "minicpm": "granite", "olmo3": "olmo3"}
    families |= {"afm": "arcee", "mixtral": "mixtral", "olmoe": "olmoe"}
    families |= dict.fromkeys(("qwen3-30b-a3b", "qwen3-235b-a22b"), "qwen3_moe")
    families |= {"qwen1.5": "qwen2_moe", "deepseek-v2-lite": "deepseek_v2", "deepseek": "deepseek_v3"}
    families |= {"gpt": "gpt_oss"}
    assert kind_of(model(name)) == families.get(name, families[name.partition("-")[0]])


def test_a_model_s_name_is_a_job_that_trains_it():
    job = load_job("qwen3-8b", ["layout.tp=8"])
    assert job.model == model("qwen3-8b") and job.train.global_batch * job.model.sequence == 2**22
    with pytest.raises(BadInputError, match="did you mean qwen3-32b"):
        load_job("qwen3-32")


@pytest.mark.parametrize("name", recipe_names("models"))
def test_every_recipe_can_be_cut_in_two(name):
    config = model(name)
    tp = 1 if config.num_kv_heads % 2 else 2
    assert isinstance(load_job("tiny", [f"model={name}", f"layout.tp={tp}", "layout.pp=2"]), Job)


def test_flops_of_a_plain_gpt_are_megascales_formula():
    h, s, layers, v = 12288, 2048, 96, 64000
    formula = 72 * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model("megascale-175b").flops_per_token() == pytest.approx(formula, rel=1e-9)
