"""From raw text to a trained, evaluated model: config → data → tokenizer → prepare → train → evaluate, predict."""
