"""Games: several players, each with a reward of its own. See ``envs.base.Game``."""
