"""Tool calls out of generated text, by model family. Fed with text cut anywhere; the result depends on the text alone."""
