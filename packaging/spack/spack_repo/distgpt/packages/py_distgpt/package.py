# Made by packaging/recipes.py from pyproject.toml.
import os

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyDistgpt(PythonPackage):
    """Pretrain and run GPT-2-style models from one CPU core to many nodes, without a deep-learning framework."""

    homepage = ""
    # The source is that of `python -m build --sdist`, in the folder where spack is called.
    manual_download = True

    license("MIT")

    version("0.1.0")

    variant("mpi", default=True, description="Train on multiple ranks")
    variant("parquet", default=False, description="Read Parquet files")
    variant("prometheus", default=False, description="Export metrics of training runs for Prometheus")
    variant("serve", default=False, description="Answer over HTTP")
    variant("tensorboard", default=False, description="Log to TensorBoard")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-hatchling@1.25:", type="build")
    depends_on("py-numpy@2.0:", type=("build", "run"))
    depends_on("py-numba@0.62:", type=("build", "run"))
    depends_on("py-click@8.1:", type=("build", "run"))
    depends_on("py-rich@13.8:", type=("build", "run"))
    depends_on("py-tokenizers@0.20:", type=("build", "run"))
    depends_on("py-matplotlib@3.9:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-mpi4py@4.0:", type=("build", "run"), when="+mpi")
    depends_on("py-pyarrow@15:", type=("build", "run"), when="+parquet")
    depends_on("py-prometheus-client@0.20:", type=("build", "run"), when="+prometheus")
    depends_on("py-starlette@0.46:", type=("build", "run"), when="+serve")
    depends_on("py-uvicorn@0.34:", type=("build", "run"), when="+serve")
    depends_on("py-prometheus-client@0.20:", type=("build", "run"), when="+serve")
    depends_on("py-tensorboardx@2.6:", type=("build", "run"), when="+tensorboard")

    def url_for_version(self, version):
        return f"file://{os.getcwd()}/distgpt-{version}.tar.gz"

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def train(self):
        """Train three steps with what was installed."""
        distgpt = Executable(join_path(self.prefix.bin, "distgpt"))
        distgpt("train", "--steps", "3", "--out", join_path(self.stage.path, "run"))
