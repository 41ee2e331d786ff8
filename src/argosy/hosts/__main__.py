"""`python -m argosy.hosts RUN`: the process that gives hosts to a run."""

import sys

from argosy.hosts.provider import main

sys.exit(main(sys.argv[1]))
