"""A ReFrame test: `distgpt bench node` on a node of each partition, its bits, and its figures over time.

    reframe -C SITE.py -c benchmarks/reframe/distgpt_node.py -r --performance-report
    reframe -c benchmarks/reframe/distgpt_node.py -r -S minutes=3        # this machine, no scheduler

distgpt has to be on the PATH of the node: by `-m MODULE`, or by the environment of a partition. The test
passes if the bits are right and no figure is beyond its reference. What there was no time for is left out.
"""

import json
from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.backends import getlauncher


@rfm.simple_test
class distgpt_node(rfm.RunOnlyRegressionTest):
    descr = "distgpt: training, scaling, exchange, disk and text on one node"
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    executable = "distgpt"
    num_tasks = 1
    exclusive_access = True
    maintainers = ["your site"]

    minutes = variable(float, value=10.0)
    # An example, from two quiet cores of a Zen 4 [2026-11-27]. Half of the disk, timed once, is enough.
    # Enter your own partitions, by what the first runs have reported. Joules are better below, rates above.
    reference = {
        "example:zen4-2-cores": {
            "peak_float32": (209, -0.1, None, "GFLOP/s"),
            "train_gpt2_bfloat16": (489, -0.1, None, "tokens/s"),
            "checkpoint_write": (0.965, -0.5, None, "GB/s"),
        }
    }

    @run_after("setup")
    def take_the_whole_node(self):
        """Start it in the job's script: it starts its ranks itself, which srun would not let it."""
        self.job.launcher = getlauncher("local")()
        if (processor := self.current_partition.processor) and processor.num_cpus:
            self.num_cpus_per_task = processor.num_cpus

    @run_before("run")
    def ask(self):
        self.executable_opts = ["bench", "node", "--out", "report", "--minutes", f"{self.minutes:g}"]
        self.time_limit = f"{2 + int(1.2 * self.minutes)}m"
        self.keep_files = ["report"]

    @deferrable
    def found(self):
        return json.loads(Path(self.stagedir, "report", "node.json").read_text())

    @sanity_function
    def bits_are_right(self):
        nothing = {"right": False, "verdict": "bits were not compared: give more minutes"}
        bits = sn.evaluate(self.found())["bits"] or nothing
        return sn.assert_true(bits["right"], msg=bits["verdict"])

    @run_before("performance")
    def take_figures(self):
        for name, figure in sn.evaluate(self.found())["figures"].items():
            value = sn.defer(figure["value"])
            self.perf_variables[name] = sn.make_performance_function(value, figure["unit"])
