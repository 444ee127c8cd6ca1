"""If these fail, weights that someone changed pass as those of who has the key."""

import json
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from foreign_case import deepspeed_state, write_deepspeed
from safetensors.torch import save_file

from myriad.checkpoint.checkpoint_files import save
from myriad.checkpoint.foreign.hugging_face_config import model_of
from myriad.checkpoint.foreign.hugging_face_names import tensor_mappings
from myriad.checkpoint.storage.checkpoint_folder import Checkpoint, CheckpointFolder, open_checkpoint
from myriad.checkpoint.storage.signature import (
    SIGNATURE,
    check_signature,
    load_key,
    load_signing_key,
    require_signature,
    sign,
)
from myriad.cli.command_line import run_command
from myriad.errors import BadInputError
from myriad.model.tensor_shard import TensorShard

PEM, NO_PASSWORD = serialization.Encoding.PEM, serialization.NoEncryption()


def write_keys(folder: Path, name: str = "key") -> tuple[Path, Path]:
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, NO_PASSWORD))
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(PEM, spki))
    return private, public


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    save(folder, 3, [TensorShard("model.w", (4, 2), (0, 0), torch.ones(4, 2))], {"step": 3})
    return folder.at_step(3)


@pytest.fixture(params=["ed25519", "secret"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    if request.param == "ed25519":
        return write_keys(tmp_path)
    (tmp_path / "secret").write_text("s" * 32 + "\n")
    return tmp_path / "secret", tmp_path / "secret"


def test_signed_files_are_right(checkpoint: Checkpoint, keys: tuple[Path, Path]) -> None:
    assert sign(checkpoint, load_signing_key(keys[0], "--key")) == len(checkpoint.storage.names("step-3")) - 1
    assert check_signature(checkpoint, load_key(keys[1], "--key")) == []
    assert load_key(keys[0], "--key").key_id == load_key(keys[1], "--key").key_id


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda folder: change(folder / "__0_0.distcp"), "__0_0.distcp: its bytes are not those"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b""), "__0_0.distcp: 0 bytes instead of"),
        (lambda folder: (folder / ".metadata").unlink(), ".metadata: missing"),
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json: is not signed"),
        (lambda folder: (folder / "inner").mkdir() or (folder / "inner/x").write_text(""), "inner/x: is not"),
        (lambda folder: (folder / "link").symlink_to("/etc/passwd"), "link is not a regular file"),
        (lambda folder: (folder / SIGNATURE).unlink(), "missing: the folder is not signed"),
        (lambda folder: (folder / SIGNATURE).write_text("[]"), "not a signature of the format"),
        (lambda folder: (folder / SIGNATURE).write_text("[" * 10**5), "nested too deep"),
    ],
)
def test_what_was_changed_is_named(
    checkpoint: Checkpoint, keys: tuple[Path, Path], do: object, says: str
) -> None:
    sign(checkpoint, load_key(keys[0], "--key"))
    assert callable(do)
    do(checkpoint.storage.root / checkpoint.name)  # type: ignore[attr-defined]
    (problem,) = check_signature(checkpoint, load_key(keys[1], "--key"))
    assert says in problem


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("signature", "00" * 64, "the signature is wrong"),
        ("signature", "00", "the signature is wrong"),
        ("signature", 7, "signature must be hexadecimal digits"),
        ("files", {}, "the signature is wrong"),
        ("key", "other", "signed with another key"),
        ("algorithm", "none", "signed with another key"),
    ],
)
def test_a_changed_signature_is_refused(
    checkpoint: Checkpoint, keys: tuple[Path, Path], key: str, value: object, says: str
) -> None:
    sign(checkpoint, load_key(keys[0], "--key"))
    path = Path(checkpoint.where) / SIGNATURE
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    (problem,) = check_signature(checkpoint, load_key(keys[1], "--key"))
    assert says in problem


def test_another_key_does_not_do(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Nor a file that is signed with one key and names the other."""
    ours, theirs = write_keys(tmp_path, "ours"), write_keys(tmp_path, "theirs")
    sign(checkpoint, load_key(theirs[0], "--key"))
    known = load_key(ours[1], "--key")
    (problem,) = check_signature(checkpoint, known)
    assert "signed with another key" in problem
    path = Path(checkpoint.where) / SIGNATURE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"key": known.key_id}))
    (problem,) = check_signature(checkpoint, known)
    assert "the signature is wrong" in problem


def test_keys_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    private, public = write_keys(tmp_path)
    with pytest.raises(BadInputError, match="must be a private key"):
        load_signing_key(public, "--sign")
    (tmp_path / "short").write_text("secret")
    curve = ec.generate_private_key(ec.SECP256R1())
    locked = serialization.BestAvailableEncryption(b"password")
    other = {
        "curve": curve.private_bytes(PEM, serialization.PrivateFormat.PKCS8, NO_PASSWORD),
        "locked": curve.private_bytes(PEM, serialization.PrivateFormat.PKCS8, locked),
        "broken": private.read_bytes()[:60],
        "empty": b"-----BEGIN PUBLIC KEY-----\n-----END PUBLIC KEY-----\n",
    }
    for name, content in other.items():
        (tmp_path / name).write_bytes(content)
    for name in ("missing", "short", *other, "."):
        with pytest.raises(BadInputError, match="--key = "):
            load_key(tmp_path / name, "--key")


def test_the_commands_sign_and_verify(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = map(str, write_keys(tmp_path))
    assert run_command(["checkpoint", "verify", checkpoint.where, "--key", public]) == 1
    assert run_command(["checkpoint", "sign", checkpoint.where, "--key", private]) == 0
    assert run_command(["checkpoint", "verify", checkpoint.where, "--key", public]) == 0
    assert "whole, signed with the key" in capsys.readouterr().out
    assert run_command(["checkpoint", "verify", checkpoint.where]) == 0


def test_an_export_is_verified_and_imported_if_it_is_signed(tmp_path: Path) -> None:
    private, public = write_keys(tmp_path)
    export = tmp_path / "export"
    export.mkdir()
    (export / "config.json").write_text("{}")
    sign(open_checkpoint(export), load_key(private, "--sign"))
    verify = ["checkpoint", "verify", str(export), "--key", str(public)]
    assert run_command(verify) == 0
    require_signature(export, load_key(public, "--key"), "CHECKPOINT")
    (export / "model.safetensors").write_bytes(b"other weights")
    assert run_command(verify) == 1
    with pytest.raises(BadInputError, match=r"model\.safetensors: is not signed"):
        require_signature(export, load_key(public, "--key"), "CHECKPOINT")


CONFIG = {"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 8}
CONFIG |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}


def test_weights_go_through_a_signed_export(tmp_path: Path) -> None:
    """From a folder of another system to a run, to a signed folder, and to a run again."""
    private, public = map(str, write_keys(tmp_path))
    first, run, export = (tmp_path / name for name in ("first", "run", "export"))
    first.mkdir()
    (first / "config.json").write_text(json.dumps(CONFIG))
    mappings = tensor_mappings(model_of(CONFIG))
    shapes = {name: shape for one in mappings for name, shape in one.their_shapes().items()}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, first / "model.safetensors")
    unsigned = ["checkpoint", "import", str(first), str(run), "--key", public]
    assert run_command(unsigned) == 2 and not run.exists()
    assert run_command(unsigned[:-2]) == 0
    assert run_command(["checkpoint", "export", str(run), str(export), "--sign", public]) == 2
    assert run_command(["checkpoint", "export", str(run), str(export), "--sign", private]) == 0
    assert run_command(["checkpoint", "verify", str(export), "--key", public]) == 0
    again = ["checkpoint", "import", str(export), str(tmp_path / "again"), "--key", public]
    assert run_command(again) == 0


def test_no_file_beside_the_signed_folder_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(CONFIG)
    step = write_deepspeed(tmp_path, model, deepspeed_state(model)[1], stage=1) / "global_step6"
    private, public = write_keys(tmp_path)
    sign(open_checkpoint(step), load_key(private, "--sign"))
    words = ["checkpoint", "import", str(step), str(tmp_path / "run")]
    assert run_command([*words, "--key", str(public)]) == 2
    assert "name it with --config" in capsys.readouterr().err
    assert run_command(words) == 0, "without a key it may be beside"


def test_a_name_in_a_folder_cannot_command_the_terminal(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = map(str, write_keys(tmp_path))
    assert run_command(["checkpoint", "sign", checkpoint.where, "--key", private]) == 0
    (Path(checkpoint.where) / "\x1b]0;attacked\x07").touch()
    assert run_command(["checkpoint", "verify", checkpoint.where, "--key", public]) == 1
    assert "\\x1b]0;attacked\\x07: is not signed" in capsys.readouterr().out
