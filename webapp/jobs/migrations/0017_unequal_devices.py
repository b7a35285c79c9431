from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0016_several_devices'),
    ]

    operations = [
        migrations.AddField(
            model_name='job',
            name='need_ranks',
            field=models.TextField(blank=True, default=''),
        ),
    ]
