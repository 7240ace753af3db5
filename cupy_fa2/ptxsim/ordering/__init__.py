"""Who is ordered before whom, and what is a hazard because nobody is."""
