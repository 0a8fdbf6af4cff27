from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="spmd",
    version="0.1.0",
    description="Single-device training steps, compiled into one program for many ranks",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the spmd authors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11,<2.14",  # the versions that were run
        "numpy",
        "rich",
    ],
    extras_require={
        "test": [
            "pytest", "pytest-timeout", "pytest-xdist", "expecttest", "hypothesis", "ruff", "import-linter",
            "transformers", "safetensors",
        ],
    },
    packages=[*find_packages(include=["spmd", "spmd.*"]), "spmd.examples"],
    package_dir={"spmd.examples": "examples"},
    package_data={"spmd": ["py.typed"]},
)
