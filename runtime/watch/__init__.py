"""Each step's memory compared with the prediction: the census, the meter, and the holders of an excess."""
