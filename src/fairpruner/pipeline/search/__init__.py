"""Search: try several plans for one budget, repair each, and keep the one nearest to the original."""

from fairpruner.pipeline.search.candidates import SEARCHED_RULES, Candidate, make_candidates, useful_removals
from fairpruner.pipeline.search.choosing import EFFORT, Search, choose

__all__ = ["EFFORT", "SEARCHED_RULES", "Candidate", "Search", "choose", "make_candidates", "useful_removals"]
