"""A launch for tests of decisions."""

from argosy.sim.fleet import sim_process

RUN = sim_process.RUN
a_launch = sim_process.sim_launch
