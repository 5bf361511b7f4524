"""What crawlers share: texts cut out of replies, words to begin with, anchors to go on from, and a graph of them."""
