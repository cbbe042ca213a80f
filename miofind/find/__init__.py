"""From a request to solutions: look up, plan, search, measure in rounds, record, answer."""
