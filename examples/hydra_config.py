"""Runs composed by Hydra: hydra_config.py preset=fedams server.lr=0.3; or --multirun local.lr=0.03,0.1"""

from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig

import hansa
from hansa.config import hydra as hansa_hydra

hansa_hydra.register()  # the config "hansa" with our sections, and the group "preset"


@hydra.main(version_base=None, config_name="hansa")  # type: ignore[untyped-decorator, unused-ignore]
def main(settings: Any) -> float:
    """Run in Hydra's output folder; sweepers such as that of optuna minimise or maximise what is returned."""
    config = hansa_hydra.read(settings)  # validated by us, with all problems at once
    result = hansa.run_config(config, f"{HydraConfig.get().runtime.output_dir}/run")
    print(config.algorithm.preset, result)
    runs = result if isinstance(result, hansa.Runs) else hansa.Runs(config.title, [result])
    return runs.final("test_accuracy").mean


if __name__ == "__main__":
    main()
