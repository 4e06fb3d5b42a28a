"""Runs composed by Hydra: hydra_config.py algorithm.preset=fedams +server.lr=0.3; or --multirun local.lr=0.03,0.1"""

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import hansa
from hansa.config import from_yaml

DEFAULTS = {  # the sections and keys of a configuration file; others are added on the command line with a plus
    "algorithm": {"preset": "fedavg"},
    "data": {"name": "fashion-mini", "clients": 30},
    "local": {"lr": 0.05, "steps": 10, "batch_size": 20},
    "rounds": 20,
}
ConfigStore.instance().store(name="hansa", node=DEFAULTS)


@hydra.main(version_base=None, config_name="hansa")  # type: ignore[untyped-decorator, unused-ignore]
def main(settings: DictConfig) -> float:
    """Run in Hydra's output folder; sweepers such as that of optuna minimise or maximise what is returned."""
    config = from_yaml(OmegaConf.to_yaml(settings, resolve=True))  # validated, with all problems at once
    result = hansa.run_config(config, f"{HydraConfig.get().runtime.output_dir}/run")
    print(config.algorithm.preset, result)
    runs = result if isinstance(result, hansa.Runs) else hansa.Runs(config.title, [result])
    return runs.final("test_accuracy").mean


if __name__ == "__main__":
    main()
