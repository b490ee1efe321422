"""The examples run to the end on small data."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.filterwarnings("ignore:no compiled sparse kernel")  # where there is no compiler
def test_embeddings(tiny_bert: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("platon_example", EXAMPLES / "embeddings.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    (tmp_path / "texts.txt").write_text("\n".join(f"the cat sat on {number} mats" for number in range(40)))
    (tmp_path / "pairs.csv").write_text("a,b,score\n" + "".join(f"cat {n},dog {n},{n % 4}\n" for n in range(8)))
    words = [str(tiny_bert), str(tmp_path / "texts.txt"), str(tmp_path / "run"), "--pairs", str(tmp_path / "pairs.csv")]
    numbers = example.main([*words, "--steps", "6", "--sentences", "50"])
    assert numbers["validation cosine"] > 0.5
    assert numbers["largest difference of sparsify"] < 1e-4
    again = example.main([*words, "--steps", "6", "--sentences", "50"])  # it is finished: nothing is trained
    assert again["validation cosine"] == numbers["validation cosine"]
