"""An unrelated distribution in the package folder is named; what is no conflict passes."""

import sys

import pytest

from apex import _conflict


@pytest.fixture
def package(tmp_path):
    """A site-packages folder with apex-amp alone; returns its package folder."""
    folder = tmp_path / "apex"
    folder.mkdir()
    (folder / "__init__.py").touch()
    write(tmp_path, "apex_amp-0.1.0.dist-info/RECORD", "apex/__init__.py,,\n")
    return folder


def write(site_packages, name, text=""):
    path = site_packages / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def refusal(package):
    with pytest.raises(ImportError) as caught:
        _conflict.check(str(package))
    return str(caught.value)


def test_apex_amp_alone_is_accepted(package):
    _conflict.check(str(package))


def test_metadata_only_apex_is_accepted(package):
    write(package.parent, "apex-0.1.0.dist-info/RECORD", "apex-0.1.0.dist-info/METADATA,,\n")
    _conflict.check(str(package))


def test_editable_apex_elsewhere_is_accepted(package):
    write(package.parent, "apex-0.1.dist-info/RECORD", "__editable__.apex-0.1.pth,,\n")
    _conflict.check(str(package))


@pytest.mark.parametrize(
    "name", ["apex_cli-1.0", "apex-launcher-2.0", "apexlib-0.1", "pyapex-3.0", "torch-2.13.0"]
)
def test_distribution_of_another_name_is_accepted(package, name):
    write(package.parent, f"{name}.dist-info/RECORD", f"{name}/__init__.py,,\n")
    _conflict.check(str(package))


def test_package_in_an_archive_is_accepted(tmp_path):
    _conflict.check(str(tmp_path / "site.zip" / "apex"))


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ("apex-0.1.dist-info/RECORD", "apex/__init__.py,,\napex/amp/__init__.py,,\n"),
        ("apex-0.9.10.dev0.dist-info/RECORD", "../../bin/x,,\napex/forms.py,,\n"),
        ("apex-0.9.10dev-py3.11.egg-info/top_level.txt", "apex\n"),
        ("apex-0.1-py3.8.egg-info", "Metadata-Version: 1.0\nName: apex\n"),
    ],
    ids=["nvidia-wheel", "toolkit-wheel", "setuptools-egg-info", "distutils-egg-info"],
)
def test_distribution_with_modules_is_named(package, metadata, text):
    write(package.parent, metadata, text)
    message = refusal(package)
    version = metadata.split("-")[1].removesuffix(".dist")
    assert f"the distribution `apex` {version} " in message
    assert metadata.split("/")[0] in message
    assert str(package) in message


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        ("_autocast_utils.py", "NVIDIA's apex"),
        ("transformer/__init__.py", "NVIDIA's apex"),
        ("_extensions/__init__.py", "NVIDIA's apex"),
        ("forms.py", "the web toolkit apex of PyPI"),
        ("views.py", "the web toolkit apex of PyPI"),
    ],
)
def test_file_without_metadata_names_its_project(package, file, owner):
    write(package, file)
    assert owner in refusal(package)


def test_refusal_gives_the_commands_that_repair(package):
    write(package, "forms.py")
    message = refusal(package)
    assert f"{sys.executable} -m pip uninstall -y apex apex-amp\n" in message
    assert f"{sys.executable} -m pip install .  # in a checkout of apex-amp\n" in message


def test_refusal_names_the_package_for_import_hooks(package):
    write(package, "forms.py")
    with pytest.raises(ImportError) as caught:
        _conflict.check(str(package))
    assert (caught.value.name, caught.value.path) == ("apex", str(package))
